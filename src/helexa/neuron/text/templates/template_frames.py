"""How the server and the process that renders templates talk: frames of a length and that many bytes."""

from typing import BinaryIO

MAX_BYTES = 64 << 20
"""Size of a frame's body."""

OUT_OF_MEMORY = 77
"""Exit code of a process whose template needed more memory than it may have."""

_LENGTH_BYTES = 8


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Send one frame.

    Raises:
        OSError: nobody reads any more.
    """
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "big"))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Wait for one frame; None when the stream ends before it does, or when it is too long."""
    header = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(header, "big")
    if len(header) < _LENGTH_BYTES or length > MAX_BYTES:
        return None
    body = stream.read(length)
    return body if len(body) == length else None
