"""Records stop signals such as Ctrl-C, so that a command can wait for them instead of being interrupted."""

import selectors
import signal
import socket
from types import FrameType
from typing import Any, Self

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """A context manager that records the stop signals SIGINT, SIGTERM and SIGHUP for the method `wait`.

    In the `with` block, these signals do not end or interrupt this process. SIGCHLD (a child process ended) is recorded
    too. Stop signals that were ignored when the command started, for example because of `nohup`, stay ignored.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._former: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Self:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOPS, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._former[number] = signal.signal(number, _noted)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float | None) -> bool:
        """Wait until a signal arrives, at most `seconds`. Return whether a stop signal arrived.

        SIGCHLD also ends the wait. If `seconds` is None, the wait has no time limit.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            ready = selector.select(seconds)
        return bool(ready) and any(number in _STOPS for number in self._reader.recv(4096))


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing. Python writes the signal's number to the wake-up socket only if the signal has a handler."""
