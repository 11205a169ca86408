"""The two Unix sockets between server and engine: for frames, and for pixels.

A frame is a 4-byte little-endian length, followed by one message as a tagged msgpack struct. The engine, rank and stage
processes of a host also exchange frames.

The pixels of images arrive as file descriptors of shared memory. The server sends the pixels of a request before the
request (see `PixelSender`). Each descriptor comes with the id of its request, because a request may be canceled before
all of its pixels are sent.
"""

import os
import socket
import struct
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from helexa.neuron.engine.ipc.messages import ToEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

REQUEST = Struct("<Q")  # Format of the message that comes with a descriptor: the id of the request

_RECEIVE_SECONDS = 10.0


def encode(message: msgspec.Struct) -> bytes:
    """Return `message` as a frame: its length, then its msgpack bytes."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Splits the bytes of a socket into messages of `kind`, a union of types."""

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Buffer received bytes, and return the messages that are now complete.

        Raises:
            ValueError: a frame is longer than `MAX_FRAME_BYTES`, or its message is not of an expected type.
        """
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(
                    f"a message between helexa's processes has {length} bytes; the limit is {MAX_FRAME_BYTES} bytes"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages


def receive(connection: socket.socket, kind: type[T]) -> T:
    """Wait for the server's next message of type `kind`, return it, and drop others.

    Raises:
        BrokenPipeError: the server has closed the socket.
        ValueError: the received bytes are not a message.
    """
    decoder = FrameDecoder(ToEngine)
    while data := connection.recv(1 << 16):
        for message in decoder.feed(data):
            if isinstance(message, kind):
                # Later messages in the same data are lost. The server therefore waits for the reply to this message
                # before it sends more.
                return message
    raise BrokenPipeError("the server has closed the socket")


class PixelReceiver:
    """The engine's end of the socket on which it receives the pixels of images."""

    def __init__(self, connection: socket.socket, patch_values: int) -> None:
        self._connection = connection
        self._patch_values = patch_values
        # The server sends pixels before their request. If they are missing for this time, the server has failed.
        connection.settimeout(_RECEIVE_SECONDS)

    def receive(self, request: int, patches: Sequence[int]) -> "list[NDArray[np.float32]]":
        """Return the patches of a request's images, float32 [patches, patch_values].

        Args:
            patches: number of patches of each image.

        Raises:
            OSError: the server did not send the pixels.
        """
        return [self._receive(request, count) for count in patches]

    def _receive(self, request: int, patches: int) -> "NDArray[np.float32]":
        from helexa.neuron.vision.shared_pixels import pixel_array  # imports numpy, unlike this module

        descriptor = self._descriptor(request)
        try:
            return pixel_array(descriptor, (patches, self._patch_values))
        finally:
            os.close(descriptor)

    def _descriptor(self, request: int) -> int:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._connection, REQUEST.size, 1)
            if len(data) != REQUEST.size or not descriptors:
                raise BrokenPipeError("the server has closed the socket for pixels")
            if REQUEST.unpack(data) == (request,):
                return descriptors[0]
            os.close(descriptors[0])  # pixels of a request that was canceled
