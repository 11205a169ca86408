"""A fetch in progress: how far it is, and whether anybody still waits for it."""

import threading
from collections.abc import Callable

ProgressReport = Callable[[str, int, int], None]
"""Told of a stage, the bytes done, and the bytes in all (0: unknown)."""


class FetchAbandoned(BaseException):
    """Raised in the fetching thread when nobody waits for its result any more; never seen outside of it."""


class Fetch:
    """What a source needs of the one who asked: a place to report to, and a way to be stopped."""

    def __init__(self, report: ProgressReport) -> None:
        self._report = report
        self._abandoned = threading.Event()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report; call it often, since it is also where an abandoned fetch ends."""
        self.check()
        self._report(stage, done, total)

    def check(self) -> None:
        """End here if the fetch is abandoned."""
        if self._abandoned.is_set():
            raise FetchAbandoned

    def wait(self, seconds: float) -> None:
        """Sleep, unless the fetch is abandoned."""
        if self._abandoned.wait(seconds):
            raise FetchAbandoned

    def abandon(self) -> None:
        """Let the thread end at its next report."""
        self._abandoned.set()
