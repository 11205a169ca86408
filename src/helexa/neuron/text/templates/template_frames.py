"""Frames between the server and the processes that render templates: a length and a body."""

from typing import BinaryIO

MAX_BYTES = 64 << 20
"""Maximum bytes of a frame's body."""

OUT_OF_MEMORY = 77
"""Exit code of a process whose template exceeded the memory limit."""

_LENGTH_BYTES = 8


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Send one frame.

    Raises:
        OSError: the receiver has closed the stream.
    """
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "big"))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Wait for one frame; return None if the stream ends first or the frame is too long."""
    header = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(header, "big")
    if len(header) < _LENGTH_BYTES or length > MAX_BYTES:
        return None
    body = stream.read(length)
    return body if len(body) == length else None
