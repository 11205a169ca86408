"""Detects an engine that hangs."""

import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from helexa.neuron.engine_client.process_and_standby import Child

log = logging.getLogger(__name__)

_EXPECTED_FACTOR = 10.0  # a step may take this many times as long as expected
_MIN_SECONDS = 5.0
_MAX_CHECK_SECONDS = 1.0
_CHECKS = 8  # minimum number of checks within the time that a working engine may take without progress

_SLEEPS = "S"  # state of a thread that waits for an event, for example for another thread


async def kill_when_hung(
    child: Child, seconds: float, works: Callable[[], bool], count_messages: Callable[[], int]
) -> None:
    """Kill an engine that has work but makes no progress.

    Return after the engine has ended or was killed.

    Args:
        seconds: time limit. `HangDetector` describes when a shorter limit applies.
        works: function that returns whether the engine has work, so that progress is expected.
        count_messages: function that returns the number of messages that the engine has sent.
    """
    detector, idle_time = HangDetector(seconds), IdleTime(child.pid)
    while child.alive:
        await child.wait(detector.check_seconds)
        if not detector.is_silent(count_messages() + child.progress, works()):
            idle_time.restart()
            continue
        idle_seconds = idle_time.since_last_call(detector.check_seconds)
        if (limit := detector.hangs_after(child.expected_step_seconds, idle_seconds)) is not None:
            child.kill_reason = f"the engine made no progress for {limit:.3g} s and was killed"
            log.error(
                "engine hangs and is killed pid=%d; its stack traces follow, and the node starts a new engine",
                child.pid,
            )
            await child.log_stacks()
            child.signal(signal.SIGKILL)
            return


class HangDetector:
    """Detects an engine that has work but makes no progress, by two limits:

    * `max_seconds` without progress.
    * In a step with a known expected duration: ten times this duration, and at least 5 seconds, without progress and
      with all threads of the engine asleep.
    """

    def __init__(self, max_seconds: float) -> None:
        self.check_seconds = min(max_seconds / _CHECKS, _MAX_CHECK_SECONDS)
        self._max_seconds = max_seconds
        self._last_count = -1
        self._silent_checks = 0
        self._idle_seconds = 0.0

    def is_silent(self, news: int, working: bool) -> bool:
        """Record a check; return whether the engine has work but made no progress.

        Args:
            news: a counter that grows with each message from the engine and with the engine's progress count.
        """
        silent = working and news == self._last_count
        self._last_count = news
        if not silent:
            self._silent_checks, self._idle_seconds = 0, 0.0
        return silent

    def hangs_after(self, expected_seconds: float, idle_seconds: float) -> float | None:
        """Record a check without progress; return the exceeded limit in seconds.

        Return None if no limit is exceeded.

        Args:
            expected_seconds: expected duration of the current step; 0 if unknown.
            idle_seconds: for how many seconds since the last check all threads of the engine slept (see `IdleTime`).
        """
        # Checks are counted and not seconds, because the clock runs on while the server process itself is suspended.
        # The first check without progress does not count, because it may come right after progress.
        self._silent_checks += 1
        if (self._silent_checks - 1) * self.check_seconds >= self._max_seconds:
            return self._max_seconds
        if expected_seconds <= 0:
            self._idle_seconds = 0.0
            return None
        # Only sleep counts: a slow engine that computes, waits for a core or reads a disk is not killed.
        self._idle_seconds += idle_seconds
        limit = max(_EXPECTED_FACTOR * expected_seconds, _MIN_SECONDS)
        return limit if self._idle_seconds >= limit else None


class IdleTime:
    """Measures for how long all threads of a process slept, as in a deadlock.

    A process does not sleep while one of its threads runs, waits for a core or a disk, or is stopped by a signal or a
    debugger.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._tasks = proc / str(pid) / "task"
        # by thread id: nanoseconds in which the thread ran or waited for a core; None if unknown
        self._before: dict[str, int] | None = None

    def restart(self) -> None:
        """Forget earlier calls: the next call of `since_last_call` returns 0."""
        self._before = None

    def since_last_call(self, seconds: float) -> float:
        """Return for how many of the last `seconds` the process slept; 0 if unknown.

        `seconds` is the time since the last call. The first call returns 0.
        """
        before, self._before = self._before, {}
        busy = 0.0
        try:
            for task in self._tasks.iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    now = sum(int(number) for number in (task / "schedstat").read_text().split()[:2])
                    self._before[task.name] = now
                    # `schedstat` contains a run or a wait only after its end. A thread that is not asleep therefore
                    # counts as busy for all `seconds`.
                    spent = (now - (before or {}).get(task.name, now)) / 1e9 if state == _SLEEPS else seconds
                    busy = max(busy, spent)
        except (OSError, ValueError, IndexError):  # not Linux, or the process has ended
            self._before = None
            return 0.0
        return max(seconds - busy, 0.0) if before else 0.0
