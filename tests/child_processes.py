"""A pytest plugin: processes of tests start with default signal dispositions, and end with a failed test."""

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
    """Start processes with default signal dispositions.

    The shell ignores SIGINT in a script's background commands, `nohup` ignores SIGHUP, and processes inherit what is
    ignored. A handler that does nothing keeps the tests running, and is not inherited.
    """
    ignored = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def run_id() -> None:
    """Mark the processes of this run, and start Python's resource tracker, which all tests share, outside of a test."""
    os.environ[_RUN] = uuid.uuid4().hex
    resource_tracker.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Kill the processes that a failed test started.

    Objects that stand for these processes are deleted while some later test runs, and would fail that test with a
    warning. The run has failed, so from here on these warnings tell nothing.
    """
    try:
        return (yield)
    finally:
        if item.stash.get(_FAILED, False):
            _kill_processes_of(item)
            for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
                item.config.addinivalue_line("filterwarnings", f"ignore::{warning}")


def _kill_processes_of(item: pytest.Item) -> None:
    """pytest names the test that runs in `PYTEST_CURRENT_TEST`, which processes inherit."""
    mark = {_RUN: os.environ.get(_RUN), "PYTEST_CURRENT_TEST": f"{item.nodeid} (call)"}
    killed: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and mark.items() <= process.environ().items():
                process.kill()
                killed.append(process)
        except psutil.Error:
            continue  # the process has ended, or belongs to another user
    psutil.wait_procs(killed, timeout=10)
