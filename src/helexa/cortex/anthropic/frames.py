"""Cuts an event stream's bytes into events."""

from helexa.core.sse import MAX_EVENT_BYTES


class Frames:
    """Takes bytes however they arrive; gives the data of each event, and None for a comment, which proves life."""

    def __init__(self) -> None:
        self._held = bytearray()  # the beginning of a line
        self._data: list[bytes] = []
        self._data_size = 0
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes | None]:
        """Take the next bytes; return what they complete.

        Raises:
            ValueError: an event longer than `MAX_EVENT_BYTES`.
        """
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n") if chunk else chunk
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._held += chunk
        if len(self._held) + self._data_size > MAX_EVENT_BYTES:
            raise ValueError(f"event is over the limit of {MAX_EVENT_BYTES} bytes")
        if b"\n" not in chunk:
            return []
        *lines, rest = bytes(self._held).split(b"\n")
        self._held = bytearray(rest)
        found: list[bytes | None] = []
        for line in lines:
            if not line:
                if self._data:
                    found.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data, self._data_size = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
                self._data_size += len(line)
            elif line.startswith(b":"):
                found.append(None)
        return found
