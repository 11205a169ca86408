"""For how long a process slept: statistics of its threads, read from Linux or from files of a test."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from helexa.neuron.engine_client.watchdog import IdleTime

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel has no schedstat")


@pytest.fixture
def sleeper() -> Iterator[psutil.Popen]:
    """A process that sleeps."""
    process = psutil.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    while process.status() != psutil.STATUS_SLEEPING:
        os.sched_yield()
    yield process
    with suppress(psutil.NoSuchProcess):
        process.kill()
    process.stdout.close()
    process.wait()


def test_sleep_time_of_a_process_counts_as_idle_time(sleeper: psutil.Popen) -> None:
    idle_time = IdleTime(sleeper.pid)
    assert idle_time.since_last_call(2.0) == 0.0  # unknown before the first call
    assert idle_time.since_last_call(2.0) > 1.0
    idle_time.restart()
    assert idle_time.since_last_call(2.0) == 0.0


def test_process_stopped_by_sigstop_does_not_count_as_idle(sleeper: psutil.Popen) -> None:
    idle_time = IdleTime(sleeper.pid)
    idle_time.since_last_call(2.0)
    sleeper.send_signal(signal.SIGSTOP)
    while sleeper.status() != psutil.STATUS_STOPPED:
        os.sched_yield()
    assert idle_time.since_last_call(2.0) == 0.0


def test_ended_process_has_no_idle_time(sleeper: psutil.Popen) -> None:
    idle_time = IdleTime(sleeper.pid)
    idle_time.since_last_call(2.0)
    sleeper.kill()
    sleeper.wait()
    assert idle_time.since_last_call(2.0) == 0.0


def write_thread(folder: Path, thread: int, state: str, ran: float, waited: float) -> None:
    """Write the statistics of a thread: its state, and the seconds it ran on a core and waited for a core."""
    task = folder / "7" / "task" / str(thread)
    task.mkdir(parents=True, exist_ok=True)
    (task / "stat").write_text(f"{thread} (a) name) {state} 1 7 7 0 -1\n")
    (task / "schedstat").write_text(f"{int(ran * 1e9)} {int(waited * 1e9)} 12\n")


@pytest.mark.parametrize(
    ("state", "ran", "waited", "idle"),
    [
        ("S", 0.0, 0.0, 2.0),
        ("S", 0.25, 0.0, 1.75),
        ("S", 0.25, 1.25, 0.5),
        ("S", 0.0, 5.0, 0.0),
        ("R", 0.0, 0.0, 0.0),
        ("D", 0.0, 0.0, 0.0),
        ("T", 0.0, 0.0, 0.0),
        ("t", 0.0, 0.0, 0.0),
    ],
    ids=["sleeps", "ran", "waited for a core", "waited long", "runs", "reads from disk", "stopped", "in a debugger"],
)
def test_process_counts_as_idle_only_while_all_its_threads_sleep(
    tmp_path: Path, state: str, ran: float, waited: float, idle: float
) -> None:
    time = IdleTime(7, tmp_path)
    write_thread(tmp_path, 7, "S", 10.0, 20.0)
    write_thread(tmp_path, 8, "S", 30.0, 40.0)
    assert time.since_last_call(2.0) == 0.0
    write_thread(tmp_path, 8, state, 30.0 + ran, 40.0 + waited)
    assert time.since_last_call(2.0) == pytest.approx(idle)


def test_idle_time_is_always_0_if_process_statistics_are_missing(tmp_path: Path) -> None:
    time = IdleTime(7, tmp_path)
    assert [time.since_last_call(1.0) for _ in range(3)] == [0.0] * 3
