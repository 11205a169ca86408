"""A pytest plugin: tests start processes with default signal handling; a failed test's processes are killed."""

import os
import signal
import uuid
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker

import psutil
import pytest

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_RUN = "PYTEST_RUN_ID"
_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> Iterator[None]:
    """Replace ignored signals by a handler that does nothing, so that child processes start with default handling.

    The shell ignores SIGINT in a script's background commands, `nohup` ignores SIGHUP, and child processes inherit
    ignored signals. Child processes do not inherit handlers.
    """
    ignored = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def run_id() -> None:
    """Set an environment variable that identifies this run's processes; start Python's shared resource tracker.

    The resource tracker must start outside of a test, or it would be killed with the processes of a failed test.
    """
    os.environ[_RUN] = uuid.uuid4().hex
    resource_tracker.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Kill the processes that a failed test started, and ignore resource warnings from then on.

    Python deletes the killed processes' objects during a later test, and the resulting warning would fail that test.
    """
    try:
        return (yield)
    finally:
        if item.stash.get(_FAILED, False):
            _kill_processes_of(item)
            for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
                item.config.addinivalue_line("filterwarnings", f"ignore::{warning}")


def _kill_processes_of(item: pytest.Item) -> None:
    """Kill the processes that inherited this test's name in `PYTEST_CURRENT_TEST`."""
    mark = {_RUN: os.environ.get(_RUN), "PYTEST_CURRENT_TEST": f"{item.nodeid} (call)"}
    killed: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and mark.items() <= process.environ().items():
                process.kill()
                killed.append(process)
        except psutil.Error:
            continue  # the process has ended, or belongs to another user
    psutil.wait_procs(killed, timeout=60)
