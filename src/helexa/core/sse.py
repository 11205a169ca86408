"""Server-sent events: frames out, events in."""

from dataclasses import dataclass

DONE = b"data: [DONE]\n\n"
"""How the OpenAI dialects end a stream."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: proves that the connection lives, and means nothing."""

MAX_EVENT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event: its data lines joined, and its name (`message` unless the server said otherwise)."""

    data: str
    event: str = "message"


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event on the wire; `data` must be one line, as JSON is."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class EventParser:
    """Cuts a byte stream into events, however the bytes arrive."""

    def __init__(self) -> None:
        self._line = b""
        self._event = ""
        self._data: list[str] = []
        self._data_size = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Take the next bytes; return the events they complete.

        Raises:
            ValueError: an event longer than `MAX_EVENT_BYTES`.
        """
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")  # the second half of a CRLF
        self._after_cr = chunk.endswith(b"\r")
        text = (self._line + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._line = text.split(b"\n")
        events = [event for line in lines if (event := self._take(line.decode("utf-8", "replace")))]
        if len(self._line) + self._data_size > MAX_EVENT_BYTES:
            raise ValueError(f"event is over the limit of {MAX_EVENT_BYTES} bytes")
        return events

    def _take(self, line: str) -> ServerSentEvent | None:
        """Take a line; the empty one ends an event."""
        if self._at_start:
            self._at_start, line = False, line.removeprefix("\ufeff")
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                self._data.append(value)
                self._data_size += len(value) + 1  # an empty one takes room too
            elif field == "event":
                self._event = value
            return None
        event = ServerSentEvent("\n".join(self._data), self._event or "message") if self._data else None
        self._data, self._data_size, self._event = [], 0, ""
        return event
