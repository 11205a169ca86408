"""Server-sent events: frames out, events in."""

import re
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
    event_line = b"" if event is None else b"event: " + event.encode() + b"\n"
    return event_line + b"data: " + data + b"\n\n"


_EVENT_END = re.compile(rb"\n\r?\n")


def first_event_end(data: bytes | bytearray, begin: int = 0) -> int:
    """Return where the first event that ends in `data[begin:]` ends, 0 if none does."""
    match = _EVENT_END.search(data, begin)
    return 0 if match is None else match.end()


def last_event_end(data: bytes | bytearray, begin: int, end: int) -> int:
    """Return where the last event that ends within `data[begin:end]` ends, 0 if none does."""
    lf, crlf = data.rfind(b"\n\n", begin, end), data.rfind(b"\n\r\n", begin, end)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


class LineSplitter:
    """Splits an event stream's bytes into lines, however the bytes arrive. A line ends with LF, CR or CRLF."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the line that has not ended."""
        return len(self._line)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes; return the lines they complete."""
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")  # the second half of a CRLF
        self._after_cr = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._line += chunk
        if b"\n" not in chunk:
            return []
        *lines, partial_line = bytes(self._line).split(b"\n")
        self._line = bytearray(partial_line)
        return lines


class EventParser:
    """Parses a byte stream into events, however the bytes arrive."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._event = ""
        self._data: list[str] = []
        self._data_size = 0
        self._at_start = True

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Take the next bytes; return the events they complete.

        Raises:
            ValueError: an event longer than `MAX_EVENT_BYTES`.
        """
        lines = self._lines.feed(chunk)
        events = [event for line in lines if (event := self._take(line.decode("utf-8", "replace")))]
        if self._lines.held_bytes + self._data_size > MAX_EVENT_BYTES:
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
