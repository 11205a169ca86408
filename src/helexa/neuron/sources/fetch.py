"""Report the progress of a running fetch, and cancel it."""

import threading
from collections.abc import Callable

ProgressReport = Callable[[str, int, int], None]
"""Function that receives the stage, the number of bytes done, and the total number of bytes (0 if unknown)."""


class FetchAbandoned(BaseException):
    """Raised in the fetching thread to end a canceled fetch. Never leaves the thread."""


class Fetch:
    """Handle of a running fetch, which reports its progress and can cancel it."""

    def __init__(self, report: ProgressReport) -> None:
        self._report = report
        self._abandoned = threading.Event()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report progress, or raise `FetchAbandoned` if the fetch is canceled. Call this often."""
        self.check()
        self._report(stage, done, total)

    def check(self) -> None:
        """Raise `FetchAbandoned` if the fetch is canceled."""
        if self._abandoned.is_set():
            raise FetchAbandoned

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`; raise `FetchAbandoned` as soon as the fetch is canceled."""
        if self._abandoned.wait(seconds):
            raise FetchAbandoned

    def abandon(self) -> None:
        """Cancel the fetch. The fetching thread ends at its next progress report."""
        self._abandoned.set()
