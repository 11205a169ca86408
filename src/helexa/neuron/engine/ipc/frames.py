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
    """Return `message` as a frame: its length, then its msgpack bytes."""
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
        """Append received bytes to the buffer, and return the messages that are now complete.

        Raises:
            ValueError: a frame is longer than `MAX_FRAME_BYTES`, or contains a message of another type.
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
    """Wait for the server's next message of type `kind`, and return it. Used in an engine process.

    Messages that arrive together with this message are lost. The server must therefore wait for a reply to this message
    before it sends the next one.

    Raises:
        BrokenPipeError: the server has closed the socket.
        ValueError: the received bytes are not a message.
    """
    decoder = FrameDecoder(ToEngine)
    while data := connection.recv(1 << 16):
        for message in decoder.feed(data):
            if isinstance(message, kind):
                return message
    raise BrokenPipeError("the server is gone")
