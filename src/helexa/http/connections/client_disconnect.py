"""Cancels the processing of a request if its client disconnects."""

import asyncio
import select
import sys
from types import TracebackType


class ClientDisconnected(Exception):
    """The client of a request has disconnected."""


class DisconnectGuard:
    """Tells whether the client of a request has disconnected.

    It is stored in the ASGI scope as `extensions[DisconnectGuard.NAME]`. An application can use it as a context
    manager: if the client disconnects, the code in the `with` block is canceled.

    Attributes:
        gone: True if the client disconnected before the response was complete.
        task: asyncio task of the request. Only this task may use the context manager.
    """

    NAME = "helexa.disconnect"

    __slots__ = ("_watched", "gone", "task")

    def __init__(self) -> None:
        self.gone = False
        self.task: asyncio.Task[None] | None = None
        self._watched = False

    def mark_gone(self) -> None:
        """Set `gone`, and cancel the task if it is in the `with` block."""
        if self.gone:
            return
        self.gone = True
        if self._watched and self.task is not None:
            self.task.cancel()

    def __enter__(self) -> None:
        """Enter the `with` block, in which a disconnect of the client cancels the task.

        Raises:
            ClientDisconnected: the client has already disconnected.
        """
        if self.gone:
            raise ClientDisconnected
        self._watched = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the `with` block. From now on, a disconnect of the client does not cancel the task.

        Raises:
            ClientDisconnected: the client disconnected, and the code in the `with` block was canceled.
        """
        self._watched = False
        if self.gone and self.task is not None and kind is asyncio.CancelledError:
            self.task.uncancel()
            raise ClientDisconnected from None


def is_gone(socket: int) -> bool:
    """Return whether the peer has closed its side of a TCP connection, even if unread data is buffered.

    Only Linux reports this. On other systems, the result is always False.

    Args:
        socket: file descriptor of the socket.
    """
    if sys.platform != "linux":
        return False
    poll = select.poll()
    poll.register(socket, select.POLLRDHUP)
    return bool(poll.poll(0))
