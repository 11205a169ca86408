"""Convert the output events of a run to the format of OpenAI's Responses API, as one body or as stream events."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.core.sse import frame
from helexa.core.wire.responses.output import Event, ResponseUsage, response_usage
from helexa.core.wire.responses.request import ResponsesRequest
from helexa.neuron.events import (
    Failed,
    Finished,
    InferenceEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    WasReasoning,
)
from helexa.neuron.routes.projectors.response_output import ResponseOutput

Keep = Callable[[str, bytes, list[dict[str, Any]]], None]
"""Function that stores a response. Its arguments are the id, the body and the output items of the response."""


class ResponseProjector:
    """Converts the output events of a run to a response of OpenAI's Responses API.

    Args:
        model: id of the model.
        request: the client's request.
        keep: function that stores the complete response before its end is sent to the client; None to store nothing.
        temperature: sampling temperature that the engine uses.
        top_p: `top_p` that the engine uses for sampling.
        stem: string that the ids of the response and of all its items contain; random by default.
        created: time of creation in seconds since 1970; the current time by default.
    """

    def __init__(
        self,
        model: str,
        request: ResponsesRequest,
        keep: Keep | None = None,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stem: str | None = None,
        created: int | None = None,
    ) -> None:
        stem = stem or secrets.token_hex(16)
        self.id = f"resp_{stem}"
        created_at = int(time.time()) if created is None else created
        head = {"id": self.id, "object": "response", "created_at": created_at, "model": model}
        shown = request.shown(store=keep is not None, temperature=temperature, top_p=top_p)
        self._head = orjson.dumps(head)[:-1] + b"," + shown[1:-1] + b","
        self._keep = keep
        self._output = ResponseOutput(stem, request.namespaces)
        self._sequence_number = 0
        self._end: Finished | None = None

    def frames(self, event: InferenceEvent) -> bytes:
        """Return the server-sent events for `event` as bytes; empty if there is none for this event."""
        match event:
            case TextDelta() | ReasoningDelta() | ToolCallStart() | ToolCallDelta() | WasReasoning():
                return b"".join([self._frame(item) for item in self._output.take(event)])
            case Started():
                response = self._response("in_progress")
                return self._response_event("response.created", response) + self._response_event(
                    "response.in_progress", response
                )
            case Finished():
                items, response, status = self._finished(event)
                return b"".join([self._frame(item) for item in items]) + self._response_event(
                    f"response.{status}", response
                )
            case Failed(error):
                items = self._output.end("incomplete") if self._sequence_number else []  # no event was sent before
                error_event: Event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
                response = self._response("failed", error=_error(error))
                frames = [self._frame(item) for item in (*items, error_event)]
                return b"".join([*frames, self._response_event("response.failed", response)])
            case _:
                raise AssertionError(f"a response has one answer, not {type(event).__name__}")

    def take(self, event: InferenceEvent) -> None:
        """Record the content of `event` that the response body must contain."""
        match event:
            case WasReasoning():
                self._output.was_reasoning()
            case TextDelta() | ReasoningDelta() | ToolCallStart() | ToolCallDelta():
                self._output.take(event)
            case Finished():
                self._end = event
            case _:
                pass

    def body(self) -> bytes:
        """Return the response body as JSON. The caller must have passed all events of the run to `take`."""
        assert self._end is not None
        _, response, _ = self._finished(self._end)
        return response

    def _finished(self, end: Finished) -> tuple[list[Event], bytes, str]:
        """Complete and store the response. Return the last stream events of its items, its body and its status."""
        status = "incomplete" if end.reason == "length" else "completed"
        events = self._output.end(status)
        details = {"reason": "max_output_tokens"} if end.reason == "length" else None
        response = self._response(status, incomplete_details=details, usage=usage_of(end))
        if self._keep is not None:
            self._keep(self.id, response, self._output.items)
        return events, response, status

    def _response(self, status: str, *, error: Any = None, incomplete_details: Any = None, usage: Any = None) -> bytes:
        """Return the response as JSON, with the items completed so far.

        `usage` is the last key, because gateways look for it at the end of the body.
        """
        tail = {
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": self._output.items,
            "usage": usage,
        }
        return self._head + orjson.dumps(tail)[1:]

    def _response_event(self, kind: str, response: bytes) -> bytes:
        return self._frame({"type": kind, "response": orjson.Fragment(response)})

    def _frame(self, event: Event) -> bytes:
        event["sequence_number"] = self._sequence_number
        self._sequence_number += 1
        return frame(orjson.dumps(event), event["type"])


def _error(error: ApiError) -> dict[str, str]:
    """Return `error` as a JSON object. Its code is one of the error codes that the Responses API defines."""
    code = error.code if error.code == "rate_limit_exceeded" else "server_error"
    return {"code": code, "message": str(error)}


def usage_of(end: Finished) -> ResponseUsage:
    """Return the token counts of a finished run in the format of the Responses API."""
    return response_usage(
        end.prompt_tokens,
        end.completion_tokens,
        cached_tokens=end.cached_tokens,
        reasoning_tokens=end.reasoning_tokens,
        prefill_ms=end.prefill_ms,
        decode_ms=end.decode_ms,
    )
