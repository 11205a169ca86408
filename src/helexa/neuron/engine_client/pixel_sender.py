"""Sends the pixels of images to an engine process."""

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from helexa.neuron.engine.ipc.pixel_socket import REQUEST

if TYPE_CHECKING:
    from helexa.neuron.vision.preprocessing.shared_pixels import SharedPixels

_PAUSE_SECONDS = 0.02


class PixelSender:
    """The server's end of the socket for pixels (see `PixelReceiver`).

    Args:
        connection: the socket. `close` closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)

    async def send(self, request: int, pixels: "Sequence[SharedPixels]") -> None:
        """Send the pixels of the images of the request with the id `request`. Wait while the socket is full.

        If the engine has ended, the pixels are dropped.
        """
        waiting = deque(pixels)
        while waiting:
            if self._send(request, waiting[0]):
                waiting.popleft()
            else:
                await asyncio.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _send(self, request: int, image: "SharedPixels") -> bool:
        try:
            socket.send_fds(self._connection, [REQUEST.pack(request)], [image.descriptor])
        except BlockingIOError:
            return False
        except OSError as error:  # the operating system limits the descriptors that are sent but not received
            return error.errno != errno.ETOOMANYREFS
        return True
