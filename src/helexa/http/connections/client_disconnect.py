"""Cancel work when the client of a request disconnects."""

import asyncio
import select
import sys
from types import TracebackType


class ClientGone(Exception):
    """The client disconnected."""


class HangUp:
    """Disconnect state of a request, in the scope's `extensions[HangUp.NAME]`.

    Used as a context manager, it cancels the code in the context when the client disconnects.

    Attributes:
        gone: True if the client disconnected before the response was complete.
        task: task of the request; the context may be entered only in this task.
    """

    NAME = "helexa.hang_up"

    __slots__ = ("_watched", "gone", "task")

    def __init__(self) -> None:
        self.gone = False
        self.task: asyncio.Task[None] | None = None
        self._watched = False

    def mark_gone(self) -> None:
        """Set `gone`, and cancel the code in the context."""
        if self.gone:
            return
        self.gone = True
        if self._watched and self.task is not None:
            self.task.cancel()

    def __enter__(self) -> None:
        """Begin to watch.

        Raises:
            ClientGone: the client has already disconnected.
        """
        if self.gone:
            raise ClientGone
        self._watched = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching.

        Raises:
            ClientGone: the client disconnected, and the code in the context was canceled.
        """
        self._watched = False
        if self.gone and self.task is not None and kind is asyncio.CancelledError:
            self.task.uncancel()
            raise ClientGone from None


def is_gone(socket: int) -> bool:
    """Return whether the peer closed a socket, even if received data is unread. Always False outside Linux.

    Args:
        socket: file descriptor of the socket.
    """
    if sys.platform != "linux":
        return False
    poll = select.poll()
    poll.register(socket, select.POLLRDHUP)
    return bool(poll.poll(0))
