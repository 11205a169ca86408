"""The socket through which an engine process receives the pixels of images, as file descriptors of shared memory.

The server sends the pixels of a request before the request (see `PixelSender`). Each descriptor comes with the id of
its request, because a request may be canceled before all of its pixels are sent.
"""

import os
import socket
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

REQUEST = Struct("<Q")
"""Format of the message that comes with a descriptor: the id of the request."""

_RECEIVE_SECONDS = 10.0


class PixelReceiver:
    """The engine's end of the socket.

    Args:
        connection: the socket.
        patch_values: number of values of a patch.
    """

    def __init__(self, connection: socket.socket, patch_values: int) -> None:
        self._connection = connection
        self._patch_values = patch_values
        connection.settimeout(_RECEIVE_SECONDS)

    def receive(self, request: int, patches: Sequence[int]) -> "list[NDArray[np.float32]]":
        """Return the pixels of the images of the request with the id `request`.

        Args:
            patches: number of patches of each image.

        Returns:
            The normalized patches of each image, float32 [P, patch_values].

        Raises:
            OSError: the server did not send the pixels.
        """
        return [self._receive(request, count) for count in patches]

    def _receive(self, request: int, patches: int) -> "NDArray[np.float32]":
        from helexa.neuron.vision.preprocessing.shared_pixels import pixel_array  # imports numpy, unlike this module

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
            os.close(descriptors[0])  # a request that was canceled
