"""Frames: messages on the Unix socket between the server process and an engine process.

A frame is a 4-byte little-endian length, followed by one tagged msgpack struct.
"""

import socket
import struct
from typing import TypeVar

import msgspec

from helexa.neuron.engine.ipc.messages import FromEngine, ToEngine

T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame: length and body."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into messages of one direction.

    Args:
        kind: the union of structs expected, `ToEngine` or `FromEngine`.
    """

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ToEngine | FromEngine]:
        """Take the next bytes; return the messages they complete.

        Raises:
            ValueError: a frame longer than `MAX_FRAME_BYTES`, or one that is no message of this direction.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages


def receive(connection: socket.socket, kind: type[T]) -> T:
    """In an engine: the one message that the server sends now, after which it waits for an answer.

    Raises:
        BrokenPipeError: the server is gone.
        ValueError: it is no message.
    """
    decoder = FrameDecoder(ToEngine)
    while data := connection.recv(1 << 16):
        for message in decoder.feed(data):
            if isinstance(message, kind):
                return message
    raise BrokenPipeError("the server is gone")
