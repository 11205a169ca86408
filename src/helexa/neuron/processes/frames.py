"""Messages between a server and its sandbox processes, sent as frames: the length of the body, then the body."""

from typing import BinaryIO

MAX_BYTES = 64 << 20
"""Maximum size of a frame's body, in bytes."""

_LENGTH_BYTES = 8


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Send one frame with the body `body`.

    Raises:
        OSError: the receiver has closed the stream.
    """
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "big"))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Wait for one frame and return its body.

    Return None if the stream ends before the frame is complete, or if the frame is longer than `MAX_BYTES`.
    """
    header = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(header, "big")
    if len(header) < _LENGTH_BYTES or length > MAX_BYTES:
        return None
    body = stream.read(length)
    return body if len(body) == length else None
