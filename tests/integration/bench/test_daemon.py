"""The benchmark daemon measures `helexa up` with a real model; both are processes."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from clients.stack import TIMEOUT_SECONDS
from helexa.bench.store.database import Reader
from ports import free_port

_UNWANTED = ("HELEXA_", "CORTEX_", "NEURON_", "BENCH_", "XDG_")
_OLD, _NEW = "a" * 40, "b" * 40
_NAMES = COLD, WARM = "single:cold:100", "single:warm:100"


class Process:
    """A process and its log. Leaving the `with` block terminates the process."""

    def __init__(self, log: Path, *arguments: str, **variables: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_UNWANTED)}
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=environ | {"XDG_STATE_HOME": str(log.parent)} | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(TIMEOUT_SECONDS)
        finally:
            self.process.kill()

    def until(self, condition: Callable[[], Any], description: str) -> Any:
        """Wait until `condition()` is true and return its value."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            if outcome := condition():
                return outcome
            time.sleep(0.05)
        raise AssertionError(f"timeout while waiting until {description}:\n{self.log.read_text()}")

    def log_matches(self, pattern: str) -> list[str]:
        """Return all matches of a regular expression in the log."""
        return re.findall(pattern, self.log.read_text())


class Up:
    """`helexa up` with a chosen build id, always on the same ports."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._folder = folder
        self.ports = [free_port() for _ in range(3)]
        self._arguments = ["--model", str(model), "--log-dir", str(folder)]
        for name, port in zip(("--port", "--metrics-port", "--neuron-port"), self.ports, strict=True):
            self._arguments += [name, str(port)]
        self._process: Process | None = None

    def start(self, build: str) -> None:
        variables = {"HELEXA_BUILD_SHA": build, "PYTHONUNBUFFERED": "1"}
        self._process = process = Process(self._folder / "up.log", "helexa", "up", *self._arguments, **variables)
        process.until(lambda: process.log_matches("helexa is up"), "helexa is up")

    def stop(self) -> None:
        if self._process is not None:
            self._process.end()


@pytest.fixture(scope="module")
def up(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A running stack of the old build. Tests may stop and start it."""
    up = Up(smollm2_gguf, tmp_path_factory.mktemp("up"))
    up.start(_OLD)
    yield up
    up.stop()


def write_config(
    folder: Path, name: str, ports: list[int], samples: int, targets: Sequence[str] = ("node", "gateway")
) -> tuple[str, Path]:
    """Write a configuration file; return its path and the path of its database."""
    where = {
        "node": f'kind = "neuron"\nendpoint = "http://127.0.0.1:{ports[2]}"\n',
        "gateway": f'kind = "cortex"\nendpoint = "http://127.0.0.1:{ports[0]}"\n',
    }
    path = folder / f"{name}.toml"
    path.write_text(
        f'[bench]\ndb_path = "{name}.sqlite"\nsamples_per_version = {samples}\nsweep_interval_secs = 1\n'
        "iteration_pause_secs = 0\n[scenarios]\nprompt_sizes = [100]\nmax_tokens = 4\n[api]\nenabled = false\n"
        + "".join(f'[[targets]]\nname = "{target}"\n{where[target]}' for target in targets)
    )
    return str(path), folder / f"{name}.sqlite"


def run_once(config: str) -> subprocess.CompletedProcess[str]:
    """Run `helexa bench once` and return the completed process."""
    command = [sys.executable, "-m", "helexa.bench", "once", "-c", config]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def counts(database: Path) -> Counter[tuple[str, str, str]]:
    """Count successful samples by (target, build, scenario)."""
    with Reader(database) as reader:
        return Counter((run.target, run.sha, run.scenario) for run in reader.runs(ok=True))


def test_samples_taken_before_a_sweep_was_killed_count_toward_the_required_number(up: Up, tmp_path: Path) -> None:
    config, database = write_config(tmp_path, "killed", up.ports, samples=1000, targets=["node"])
    with Process(tmp_path / "killed.log", "helexa.bench", "run", "-c", config) as daemon:
        daemon.until(lambda: len(daemon.log_matches(r"sample run=\d+")) >= 3, "it has taken samples")
        second = run_once(config)
        assert (second.returncode, "another helexa-bench is measuring" in second.stderr) == (1, True)
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
    logged = {int(run) for run in daemon.log_matches(r"sample run=(\d+)")}
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with Reader(database) as reader:
        stored = reader.runs(limit=5000)
        assert logged <= {run.id for run in stored}
        assert all(run.ok and len(reader.requests(run.id)) == 1 for run in stored)
    config, _ = write_config(tmp_path, "killed", up.ports, samples=len(stored) + 1, targets=["node"])
    topped_up = run_once(config)
    assert topped_up.returncode == 0, topped_up.stderr
    cold, warm = ("node", _OLD[:7], COLD), ("node", _OLD[:7], WARM)
    assert counts(database) == {cold: len(stored) + 1, warm: len(stored) + 1}  # the samples of the killed sweep count


def test_daemon_measures_only_a_new_build_if_all_configurations_have_enough_samples(up: Up, tmp_path: Path) -> None:
    config, database = write_config(tmp_path, "daemon", up.ports, samples=1)
    with Process(tmp_path / "daemon.log", "helexa.bench", "run", "-c", config) as daemon:
        daemon.until(lambda: daemon.log_matches("sweep done measured=0 failed=0 skipped=4"), "all is skipped")
        (gateway,) = {sha for target, sha, _ in counts(database) if target == "gateway"}
        old = {(target, sha, name): 1 for target, sha in (("node", _OLD[:7]), ("gateway", gateway)) for name in _NAMES}
        assert counts(database) == old
        up.stop()
        daemon.until(lambda: daemon.log_matches("target unreachable target=gateway"), "it has found nobody")
        up.start(_NEW)
        new = old | {("node", _NEW[:7], name): 1 for name in _NAMES}
        daemon.until(lambda: counts(database) == new, "the new build is measured")
        daemon.process.terminate()
        assert daemon.process.wait(TIMEOUT_SECONDS) == 0
    with Reader(database) as reader:
        runs = reader.runs(target="node", sha=_NEW[:7], scenario=WARM, ok=True)
        assert all(run.completion_tokens == 4 and run.ttft_s and run.cached_tokens for run in runs), runs
        chunks = [len(reader.requests(run.id)[0].chunks_s) for run in runs]
        assert set(chunks) <= {1, 2, 3, 4}
        # On a busy machine, all tokens can arrive at once.
        assert all(run.tpot_s or count == 1 for run, count in zip(runs, chunks, strict=True)), runs
