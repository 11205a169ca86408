"""Write a response of OpenAI's Responses API, as one body or as stream events."""

import secrets
import time
from collections.abc import Iterable
from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.core.sse import frame
from helexa.core.wire.responses_output import Event, ResponseOutput
from helexa.core.wire.responses_request import ResponsesRequest


class ResponseWriter:
    """Writes one response of OpenAI's Responses API.

    The stream events are numbered in the order of the method calls that return them, so send them in this order.

    Args:
        stored: True if the response is stored.
        stem: string that the ids of the response and of all its items contain; random by default.
        created: time of creation in seconds since 1970; the current time by default.
    """

    def __init__(
        self,
        model: str,
        request: ResponsesRequest,
        *,
        stored: bool,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stem: str | None = None,
        created: int | None = None,
    ) -> None:
        stem = stem or secrets.token_hex(16)
        self.id = f"resp_{stem}"
        self.output = ResponseOutput(stem, request.namespaced, request.custom)  # the output items
        created_at = int(time.time()) if created is None else created
        head = {"id": self.id, "object": "response", "created_at": created_at, "model": model}
        shown = request.shown(store=stored, temperature=temperature, top_p=top_p)
        self._head = orjson.dumps(head)[:-1] + b"," + shown[1:-1] + b","
        self._sequence_number = 0

    @property
    def begun(self) -> bool:
        """Whether stream events were written."""
        return self._sequence_number > 0

    def beginnings(self) -> bytes:
        """Return the events `response.created` and `response.in_progress`."""
        response = self.body("in_progress")
        return self.event("response.created", response) + self.event("response.in_progress", response)

    def frames(self, events: Iterable[Event]) -> bytes:
        """Return stream events of output items as bytes, with their sequence numbers."""
        return b"".join([self._frame(event) for event in events])

    def event(self, kind: str, response: bytes) -> bytes:
        """Return a stream event of the type `kind` that contains the response `response`."""
        return self._frame({"type": kind, "response": orjson.Fragment(response)})

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails with `error`."""
        items = self.output.end("incomplete") if self.begun else []
        error_event: Event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        frames = self.frames([*items, error_event])
        return frames + self.event("response.failed", self.body("failed", error=_error(error)))

    def body(self, status: str, *, error: Any = None, incomplete_details: Any = None, usage: Any = None) -> bytes:
        """Return the response as JSON, with the items completed so far."""
        # `usage` is the last key, because gateways look for it at the end of the body.
        tail = {
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": self.output.items,
            "usage": usage,
        }
        return self._head + orjson.dumps(tail)[1:]

    def _frame(self, event: Event) -> bytes:
        event["sequence_number"] = self._sequence_number
        self._sequence_number += 1
        return frame(orjson.dumps(event), event["type"])


def _error(error: ApiError) -> dict[str, str]:
    """Return `error` as JSON, with one of the error codes of the Responses API."""
    code = error.code if error.code == "rate_limit_exceeded" else "server_error"
    return {"code": code, "message": str(error)}
