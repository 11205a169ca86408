"""Progress and cancellation of a running fetch."""

import threading
from collections.abc import Callable

ProgressReport = Callable[[str, int, int], None]
"""Receives the stage, the bytes done, and the bytes in total (0: unknown)."""


class FetchAbandoned(BaseException):
    """Raised in the fetching thread when the fetch is canceled; never leaves the thread."""


class Fetch:
    """Handle of a running fetch: reports progress and carries the cancellation."""

    def __init__(self, report: ProgressReport) -> None:
        self._report = report
        self._abandoned = threading.Event()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report progress. Call often, because a canceled fetch ends here."""
        self.check()
        self._report(stage, done, total)

    def check(self) -> None:
        """Raise `FetchAbandoned` if the fetch is canceled."""
        if self._abandoned.is_set():
            raise FetchAbandoned

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or raise `FetchAbandoned` when the fetch is canceled."""
        if self._abandoned.wait(seconds):
            raise FetchAbandoned

    def abandon(self) -> None:
        """Cancel the fetch. The thread ends at its next report."""
        self._abandoned.set()
