"""Tells for how long a process slept, from Linux's statistics of its threads."""

from contextlib import suppress
from pathlib import Path

_SLEEPS = "S"  # state of a thread that waits for an event, for example for another thread


class IdleTime:
    """Measures for how long all threads of a process slept. A process that sleeps in a computation is in a deadlock.

    A process does not sleep while one of its threads runs, waits for a core or a disk, or is stopped by a signal or a
    debugger.

    Args:
        pid: process id.
        proc: folder with the statistics of all processes.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._tasks = proc / str(pid) / "task"
        self._before: dict[str, int] | None = None  # ns in which each thread ran or waited for a core

    def restart(self) -> None:
        """Forget earlier calls: the next call of `since_last_call` returns 0."""
        self._before = None

    def since_last_call(self, seconds: float) -> float:
        """Return for how many of the last `seconds` the process slept. Return 0 if this is unknown.

        Args:
            seconds: time since the last call of this method.
        """
        before, self._before = self._before, {}
        busy = 0.0
        try:
            for task in self._tasks.iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    now = sum(int(number) for number in (task / "schedstat").read_text().split()[:2])
                    self._before[task.name] = now
                    # Linux counts a run or a wait only after its end.
                    spent = (now - (before or {}).get(task.name, now)) / 1e9 if state == _SLEEPS else seconds
                    busy = max(busy, spent)
        except (OSError, ValueError, IndexError):  # not Linux, or the process has ended
            self._before = None
            return 0.0
        return max(seconds - busy, 0.0) if before else 0.0
