"""What ends when the client of a request hangs up."""

import asyncio
import select
import sys
from types import TracebackType


class ClientGone(Exception):
    """The client hung up."""


class HangUp:
    """Found in a request's scope as `extensions[HangUp.NAME]`. As a context it is cancelled at once when the client is
    gone, without a task that waits for that.

    Attributes:
        gone: whether the client hung up before it had its whole answer.
        task: that of the request; the context is entered there and nowhere else.
    """

    NAME = "helexa.hang_up"

    __slots__ = ("_watched", "gone", "task")

    def __init__(self) -> None:
        self.gone = False
        self.task: asyncio.Task[None] | None = None
        self._watched = False

    def happen(self) -> None:
        """The client is gone."""
        if self.gone:
            return
        self.gone = True
        if self._watched and self.task is not None:
            self.task.cancel()

    def __enter__(self) -> None:
        """Begin to watch.

        Raises:
            ClientGone: it is gone already.
        """
        if self.gone:
            raise ClientGone
        self._watched = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End.

        Raises:
            ClientGone: the client hung up; the block was cancelled.
        """
        self._watched = False
        if self.gone and self.task is not None and kind is asyncio.CancelledError:
            self.task.uncancel()
            raise ClientGone from None


def is_gone(socket: int) -> bool:
    """Whether the other side of a socket closed it, however much of what it sent is unread; only Linux tells that.

    Args:
        socket: its file descriptor.
    """
    if sys.platform != "linux":
        return False
    poll = select.poll()
    poll.register(socket, select.POLLRDHUP)
    return bool(poll.poll(0))
