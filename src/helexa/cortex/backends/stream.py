"""The stream of a backend's chat or text completion."""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import ApiError
from helexa.core.sse import DONE, MAX_EVENT_BYTES, LineSplitter, frame
from helexa.cortex.backends.completion import is_unchanged, other_counts, reported_usage
from helexa.cortex.backends.completion_choice import FAILED, Choice
from helexa.cortex.backends.errors import error_in, failed_answer, incomplete
from helexa.cortex.upstream.response_body import BYTE_ORDER_MARK, as_json, malformed, read_json

MAX_CHOICES = 128
MAX_LINES = 1000  # maximum number of lines of an event, because each new line parses all lines of the event again

_KEEP_ALIVE = b":\n\n"
_DONE_MARK = b"[DONE]"
# Fields of a backend's choice that are not copied to the converted choice. Their content is converted separately.
_MOVED = (
    "message",
    "usage",
    "error",
    "text",
)

Json = dict[str, Any]


class BackendStream:
    """Converts the bytes of a backend's stream to OpenAI's format, without I/O.

    * Each converted event has one line of data, an id, and a list of choices. Well-formed events keep their bytes.
    * The finish reason of a choice and the token counts are held back until the stream has ended. The first finish
      reason after the last output counts. If a backend sends the counts so far in each chunk, only the last counts are
      sent, because many clients add up the counts of all chunks. A client that requests counts in each chunk gets them.
    * An error in any form ends the stream with `failure`.
    """

    def __init__(
        self, new_choice: Callable[[], Choice], *, model: str, chat: bool, continuous_usage: bool = False
    ) -> None:
        self.ended = False  # True once the whole answer was returned. Later bytes of the backend have no effect.
        self.failure: ApiError | None = None  # the error that ended the stream; None without an error
        self._new_choice = new_choice  # function that returns a new `Choice`
        self._model = model  # name of the model, for chunks that do not name it
        self._chat = chat  # True for a chat completion, False for a text completion
        self._continuous_usage = continuous_usage  # True if the client requests token counts in each chunk
        self._lines = LineSplitter()
        self._at_start = True
        self._data: list[bytes] = []  # lines of an event that is not complete yet
        self._data_bytes = 0
        self._event = b""
        self._choices: dict[int, Choice] = {}
        self._held: dict[int, _LastChunk] = {}  # chunks with the finish reason, by index of the choice
        self._usage_chunk: Json | None = None
        self._usage: Json | None = None  # the last token counts so far
        self._other_counts: Json | None = None
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def feed(self, data: bytes) -> bytes:
        """Convert the next bytes of the stream, and return the bytes for the client."""
        out: list[bytes] = []
        try:
            for line in self._lines.feed(data):
                if self.ended:
                    break
                if self._at_start:
                    self._at_start, line = False, line.removeprefix(BYTE_ORDER_MARK)
                # `_read_line` is a generator. If it raises an error, `out` keeps the events from before the error.
                out.extend(self._read_line(line))
            if self._lines.partial_bytes + self._data_bytes > MAX_EVENT_BYTES:
                raise malformed(f"an event of the stream has more than {MAX_EVENT_BYTES} bytes")
        except ApiError as error:
            self.failure, self.ended = error, True
        return b"".join(out)

    def finish(self) -> bytes:
        """Convert the end of the stream, and return the last bytes for the client."""
        if self.ended:
            return b""
        last_bytes = self.feed(b"\n\n")  # the last event may lack the empty line at its end
        if not self.ended:
            try:
                last_bytes += b"".join(self._end())
            except ApiError as error:
                self.failure, self.ended = error, True
        return last_bytes

    def _read_line(self, line: bytes) -> Iterator[bytes]:
        field, colon, value = line.partition(b":")
        if field == b"data":
            yield from self._read_data(value.removeprefix(b" "))
        elif field == b"error":  # older servers of llama.cpp send errors in a field of this name
            self._event = b"error"
            yield from self._read_data(value.removeprefix(b" "))
        elif field == b"event":
            self._event = value.strip()
        elif not line:
            if self._data:
                raise malformed("an event of the stream is not JSON")
            self._event = b""
        elif not field and colon:
            yield _KEEP_ALIVE

    def _read_data(self, line: bytes) -> Iterator[bytes]:
        # A complete JSON value is read without waiting for the empty line at the end of the event, because some servers
        # send no empty lines.
        data = b"\n".join([*self._data, line])
        if data.strip() == _DONE_MARK:
            yield from self._end()
            return
        try:
            value, data = read_json(data)
        except ValueError:
            if self._event == b"error":
                value = {"message": data.decode("utf-8", "replace")}
            else:
                self._data.append(line)
                self._data_bytes += len(line)
                if len(self._data) > MAX_LINES:
                    raise malformed(f"an event of the stream has more than {MAX_LINES} lines") from None
                return
        if self._data:
            data = as_json(value)  # the value came in several `data` lines, but the client gets it in one line
        self._data, self._data_bytes = [], 0
        if not isinstance(value, dict):
            raise malformed("an event of the stream is not a JSON object")
        if (error := error_in(value, named=self._event == b"error")) is not None:
            raise error
        yield from self._read_chunk(value, data)

    def _read_chunk(self, chunk: Json, data: bytes) -> Iterator[bytes]:
        usage = reported_usage(chunk)
        self._usage = usage or self._usage
        self._other_counts = other_counts(chunk) or self._other_counts
        choices = chunk.get("choices")
        parts = [part for part in choices if isinstance(part, dict)] if isinstance(choices, list) else []
        head = self._head(chunk, usage if self._continuous_usage else None)
        if usage is not None and not parts:
            self._usage_chunk = {**head, "choices": []}
        for part in parts:
            yield from self._read_part(part, head, _Origin(chunk, data) if len(parts) == 1 else None)

    def _read_part(self, part: Json, head: Json, origin: "_Origin | None") -> Iterator[bytes]:
        """Yield one choice as a separate chunk; hold it back if it has a finish reason."""
        index = part["index"] if type(part.get("index")) is int else 0
        choice = self._choice(index)
        if self._chat:
            others = {name: value for name, value in part.items() if name not in _MOVED}
            shown = {**others, "index": index, "delta": choice.delta(part)}
            has_output = any(shown["delta"].values())
        else:
            shown = {**part, "index": index, "text": part.get("text") or ""}
            has_output = bool(shown["text"])
        had_ended = choice.reason is not None
        choice.end(part.get("finish_reason"), replace=has_output)
        last = _LastChunk({**head, "choices": [shown]}, origin)
        if choice.reason is not None and choice.reason != FAILED:
            if had_ended and not has_output:
                return
            # The backend sends a finish reason in each chunk. The held chunk was not the last one, so it is sent.
            if had_ended and index in self._held:
                yield self._held[index].released(None)
            self._held[index] = last  # held back until the stream ends
            return
        if has_output or choice.reason is None:
            yield last.released(None)
        if choice.reason == FAILED:
            raise failed_answer(choice.shown_reason)

    def _choice(self, index: int) -> Choice:
        if index not in self._choices:
            if len(self._choices) >= MAX_CHOICES:
                raise malformed(f"the response has more than {MAX_CHOICES} choices")
            self._choices[index] = self._new_choice()
        return self._choices[index]

    def _head(self, chunk: Json, usage: Json | None) -> Json:
        """Return the chunk with the fields that OpenAI's format requires in each chunk.

        `usage` replaces the token counts of the chunk; None replaces them by null.
        """
        head = dict(chunk)
        for name, value in (("id", self._id), ("created", self._created), ("model", self._model)):
            if not head.get(name):
                head[name] = value
        head["object"] = "chat.completion.chunk" if self._chat else "text_completion"
        if "usage" in chunk or usage is not None:
            head["usage"] = usage
        return head

    def _end(self) -> Iterator[bytes]:
        """Yield the held-back chunks and `[DONE]`; raise ApiError if a reason is missing."""
        if not self._choices or any(choice.reason is None for choice in self._choices.values()):
            # Without a finish reason, the answer is incomplete even if `[DONE]` follows: llama-cpp-python sends
            # `[DONE]` after an interrupted answer, too.
            raise incomplete()
        usage = self._usage or self._other_counts
        for index, choice in sorted(self._choices.items()):
            last = self._held[index]
            if usage is not None and self._usage_chunk is None and index == max(self._choices):
                last.chunk["usage"] = usage
            yield last.released(choice.last_reason())
        if self._usage_chunk is not None:
            yield frame(as_json(self._usage_chunk | {"usage": usage}))
        self.ended = True
        yield DONE


@dataclass
class _Origin:
    """A chunk as the backend sent it, and its bytes."""

    chunk: Json
    data: bytes


@dataclass
class _LastChunk:
    """A chunk with one choice, which may be the last chunk of the choice.

    If the backend sent a finish reason, the chunk is held back, because the last finish reason and the token counts are
    known only at the end of the stream. `released` then sets the finish reason.
    """

    chunk: Json
    origin: _Origin | None

    def released(self, reason: str | None) -> bytes:
        """Return the chunk with the finish reason `reason` as a server-sent event."""
        (part,) = self.chunk["choices"]
        part["finish_reason"] = reason
        if self.origin is not None and is_unchanged(self.chunk, self.origin.chunk):
            return frame(self.origin.data)
        return frame(as_json(self.chunk))
