"""Formatting and parsing of server-sent events."""

import re
from dataclasses import dataclass

DONE = b"data: [DONE]\n\n"  # last event of a stream in the OpenAI API formats

KEEP_ALIVE = b": keep-alive\n\n"  # A comment without data. It is sent to keep the connection alive.

MAX_EVENT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One server-sent event."""

    data: str  # the data lines, joined by line feeds
    event: str = "message"


def frame(data: bytes, event: str | None = None) -> bytes:
    """Return one server-sent event in wire format. `data` must be one line."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


_EVENT_END = re.compile(rb"\n\r?\n")


def first_event_end(data: bytes | bytearray, begin: int = 0) -> int:
    """Return the index after the first event end in `data` from `begin` on; 0 if none."""
    match = _EVENT_END.search(data, begin)
    return 0 if match is None else match.end()


def last_event_end(data: bytes | bytearray, begin: int, end: int) -> int:
    """Return the index in `data` after the last event that ends before `end`.

    Ends of events before the index `begin` do not count. The result is 0 if no event ends there.
    """
    lf, crlf = data.rfind(b"\n\n", begin, end), data.rfind(b"\n\r\n", begin, end)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


class LineSplitter:
    """Splits an event stream that arrives in chunks into lines (LF, CR or CRLF)."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False

    @property
    def partial_bytes(self) -> int:
        """Number of buffered bytes of the last line, which is not complete yet."""
        return len(self._line)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add the next bytes, and return the completed lines without line ends."""
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")  # the LF of a CRLF whose CR was the end of the previous chunk
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
    """Parser of a stream of server-sent events that arrives in chunks of any size."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._event = ""
        self._data: list[str] = []
        self._data_size = 0
        self._at_start = True

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Add the next bytes of the stream, and return the newly completed events.

        Raises:
            ValueError: an event is longer than `MAX_EVENT_BYTES`.
        """
        lines = self._lines.feed(chunk)
        events = [event for line in lines if (event := self._process_line(line.decode("utf-8", "replace")))]
        if self._lines.partial_bytes + self._data_size > MAX_EVENT_BYTES:
            raise ValueError(
                f"the server sent an event of more than {MAX_EVENT_BYTES} bytes in its stream; see the server's log"
            )
        return events

    def _process_line(self, line: str) -> ServerSentEvent | None:
        """Process one line. An empty line ends an event: return it if it has data."""
        if self._at_start:
            self._at_start, line = False, line.removeprefix("\ufeff")
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                self._data.append(value)
                self._data_size += len(value) + 1  # the joining line feed counts as well
            elif field == "event":
                self._event = value
            return None
        event = ServerSentEvent("\n".join(self._data), self._event or "message") if self._data else None
        self._data, self._data_size, self._event = [], 0, ""
        return event


class Frames:
    """Parser of an event stream that returns only the `data` of each event."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._data: list[bytes] = []
        self._data_size = 0

    def feed(self, chunk: bytes) -> list[bytes | None]:
        """Add the next bytes, and return one item per event or comment that is complete.

        The item of an event is its data. The item of a comment (a keep-alive) is None.

        Raises:
            ValueError: an event is longer than `MAX_EVENT_BYTES`.
        """
        frames: list[bytes | None] = []
        for line in self._lines.feed(chunk):
            if not line:
                if self._data:
                    frames.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data, self._data_size = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
                self._data_size += len(line)
            elif line.startswith(b":"):
                frames.append(None)
        # Without this limit, a node that never ends a line would fill the gateway's memory.
        if self._lines.partial_bytes + self._data_size > MAX_EVENT_BYTES:
            raise ValueError(
                f"the server sent an event of more than {MAX_EVENT_BYTES} bytes in its stream; see the server's log"
            )
        return frames
