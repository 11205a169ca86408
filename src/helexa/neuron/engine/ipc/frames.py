"""Frames: encodes and decodes the messages on the Unix sockets between the server, engine and rank processes.

A frame is a 4-byte little-endian length, followed by one message as a tagged msgpack struct.
"""

import socket
import struct
from typing import Any, TypeVar

import msgspec

from helexa.neuron.engine.ipc.messages import ToEngine

T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Splits a byte stream into messages.

    Args:
        kind: the union of expected message types, for example `ToEngine` in the engine.
    """

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Append received bytes; return the messages that these bytes complete.

        Raises:
            ValueError: a frame exceeds `MAX_FRAME_BYTES`, or its message is not of the expected types.
        """
        self._buffer += data
        messages: list[Any] = []
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
    """Wait for the server's next message, which must have the type `kind`, and return it. Used in an engine process.

    Bytes that arrive together with the message are lost, so the server must wait for an answer before it sends more.

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
