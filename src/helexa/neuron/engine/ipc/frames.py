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
    """Return the frame of a message: length and body."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Splits a byte stream into messages of one direction.

    Args:
        kind: the union of expected structs, `ToEngine` or `FromEngine`.
    """

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ToEngine | FromEngine]:
        """Append bytes; return the messages that are complete now.

        Raises:
            ValueError: a frame exceeds `MAX_FRAME_BYTES`, or is not a message of this direction.
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
    """Return the next message of type `kind` from the server. Used in an engine process.

    Bytes after the message are lost, so the server must wait for an answer before it sends more.

    Raises:
        BrokenPipeError: the server has closed the socket.
        ValueError: the bytes are not a message.
    """
    decoder = FrameDecoder(ToEngine)
    while data := connection.recv(1 << 16):
        for message in decoder.feed(data):
            if isinstance(message, kind):
                return message
    raise BrokenPipeError("the server is gone")
