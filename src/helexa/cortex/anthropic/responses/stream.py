"""Translates a streamed chat completion to the events of a Messages API stream."""

from collections.abc import Sequence
from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.core.sse import frame
from helexa.cortex.anthropic.errors import error_event, streamed_error
from helexa.cortex.anthropic.responses.blocks import Blocks
from helexa.cortex.anthropic.responses.response import malformed, reasoning
from helexa.cortex.anthropic.responses.sse_frames import Frames
from helexa.cortex.anthropic.responses.usage import anthropic_usage, message_usage, prompt_usage, stop_reason

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageStream:
    """Converts the bytes of a node's chat completion stream to the events of the Messages API, without I/O.

    The first event, `message_start`, contains the prompt's token counts. It is sent when the node has sent the first
    of:

    * the prompt's token counts, which helexa's own nodes send before the prefill
    * a chunk with `usage`
    * a chunk with output

    Each keep-alive comment of the node becomes a `ping` event.

    Args:
        model: model name in the client's request.
        message_id: id of the message.
        input_tokens: estimated number of prompt tokens. `message_start` contains it if the node sends no token counts
            before the output.
        stop_sequences: the client's stop sequences.
        request_id: id of the request, used in an error event.

    Attributes:
        failure: the error that ended the stream, or None. The event for this error was part of the bytes that `feed`,
            `finish` or `fail` returned.
    """

    def __init__(
        self,
        model: str,
        message_id: str,
        *,
        input_tokens: int = 0,
        stop_sequences: Sequence[str] = (),
        request_id: str | None = None,
    ) -> None:
        self.failure: ApiError | None = None
        self._model = model
        self._message_id = message_id
        self._prompt: dict[str, Any] = {"prompt_tokens": input_tokens}
        self._stop_sequences = stop_sequences
        self._request_id = request_id
        self._out: list[bytes] = []
        self._frames = Frames()
        self._blocks = Blocks(self._out.append)
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._matched: Any = None
        self._block_count = False
        self._ended = False

    def feed(self, chunk: bytes) -> bytes:
        """Translate the next bytes of the node's response, and return the resulting events as bytes."""
        if self._ended:
            return b""
        try:
            for data in self._frames.feed(chunk):
                if data is None:
                    self._out.append(PING)
                elif data == b"[DONE]":
                    self._close()
                    break
                else:
                    self._read(data)
        except ApiError as error:
            self._fail(error)
        except ValueError as error:
            self._fail(malformed(str(error)[:100]))
        return self._take_output()

    def finish(self) -> bytes:
        """Handle the end of the node's response, and return the last events as bytes.

        If the node sent no finish reason, its response is incomplete, and the last event is an error.
        """
        if not self._ended:
            if self._finish_reason is None:
                self._fail(malformed("it ended without a finish reason"))
            else:
                self._close()
        return self._take_output()

    def fail(self, error: ApiError) -> bytes:
        """End the stream with `error`, and return the last events as bytes; empty if the stream has already ended."""
        if not self._ended:
            self._fail(error)
        return self._take_output()

    def _take_output(self) -> bytes:
        frames = b"".join(self._out)
        self._out.clear()
        return frames

    def _begin(self) -> None:
        if self._block_count:
            return
        self._block_count = True
        usage = message_usage(self._usage or self._prompt)
        usage["output_tokens"] = 0
        message = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        self._out.append(frame(orjson.dumps({"type": "message_start", "message": message}), "message_start"))
        self._out.append(PING)

    def _read(self, data: bytes) -> None:
        event = orjson.loads(data)
        if not isinstance(event, dict):
            raise malformed("an event is not an object")
        if error := event.get("error"):
            raise streamed_error(error)
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
            self._begin()
        if not self._block_count and (prompt := prompt_usage(event.get("helexa_prompt"))):
            self._prompt = prompt
            self._begin()
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._add_delta(delta)
        finish_reason = choice.get("finish_reason")
        if isinstance(finish_reason, str):
            self._finish_reason, self._matched = finish_reason, choice.get("stop_reason")

    def _add_delta(self, delta: dict[str, Any]) -> None:
        reasoning_text = reasoning(delta)
        if isinstance(reasoning_text, str) and reasoning_text:
            self._begin()
            self._blocks.add_text("thinking", reasoning_text)
        for content_text in (delta.get("content"), delta.get("refusal")):
            if isinstance(content_text, str) and content_text:
                self._begin()
                self._blocks.add_text("text", content_text)
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            self._begin()
            for tool_call in calls:
                self._blocks.add_call(tool_call)

    def _close(self) -> None:
        self._begin()
        self._blocks.close(cut_off=self._finish_reason == "length")
        reason, sequence = stop_reason(
            self._finish_reason, self._matched, called=self._blocks.called, stop_sequences=self._stop_sequences
        )
        # If the node reports no usage, the number of deltas is the best estimate of the output tokens.
        chat_usage = self._usage or {**self._prompt, "completion_tokens": self._blocks.delta_count}
        message_delta = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": anthropic_usage(chat_usage),
        }
        self._out.append(frame(orjson.dumps(message_delta), "message_delta"))
        self._out.append(frame(b'{"type":"message_stop"}', "message_stop"))
        self._ended = True

    def _fail(self, error: ApiError) -> None:
        self._begin()
        self.failure, self._ended = error, True
        self._out.append(error_event(error, self._request_id))
