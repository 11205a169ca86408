"""Splits the bytes of an SSE stream into events."""

from helexa.core.sse import MAX_EVENT_BYTES, LineSplitter


class Frames:
    """Parser of an SSE stream that arrives in chunks of any size."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._data: list[bytes] = []
        self._data_size = 0

    def feed(self, chunk: bytes) -> list[bytes | None]:
        """Add the next bytes of the stream, and return one item per event or comment that is now complete.

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
        if self._lines.partial_bytes + self._data_size > MAX_EVENT_BYTES:
            raise ValueError(f"event is over the limit of {MAX_EVENT_BYTES} bytes")
        return frames
