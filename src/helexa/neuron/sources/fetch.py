"""Handle of a running fetch, which finds or downloads a model in a worker thread."""

import threading
from collections.abc import Callable

ProgressReport = Callable[[str, int, int], None]
"""Function that receives the stage, the number of bytes done, and the total number of bytes (0 if unknown)."""


class FetchAbandoned(BaseException):
    """Raised in the worker thread of a canceled fetch to end the thread's work. No other thread receives it."""


class Fetch:
    """Handle of a running fetch, which finds or downloads a model in a worker thread.

    The worker thread reports progress to the handle, and another thread can cancel the fetch with the handle.
    """

    def __init__(self, report: ProgressReport) -> None:
        self._report = report
        self._abandoned = threading.Event()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report progress. The worker thread calls this method often.

        Args:
            stage: name of the current stage, such as `download`.
            done: number of bytes done.
            total: total number of bytes, or 0 if unknown.

        Raises:
            FetchAbandoned: the fetch is canceled.
        """
        self.check()
        self._report(stage, done, total)

    def check(self) -> None:
        """Raise `FetchAbandoned` if the fetch is canceled."""
        if self._abandoned.is_set():
            raise FetchAbandoned

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`. Raise `FetchAbandoned` as soon as the fetch is canceled."""
        if self._abandoned.wait(seconds):
            raise FetchAbandoned

    def abandon(self) -> None:
        """Cancel the fetch. The worker thread ends at its next call of `progress`, `check` or `wait`."""
        self._abandoned.set()
