"""Sweeps into a real database while the machine's wall clock jumps."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.scripted_node import ScriptedNode, connection_to
from bench.scripted_server import Script, streamed_script
from bench.virtual_time import VirtualClock, run
from helexa.bench.config import BenchConfig
from helexa.bench.prompts_and_load_generators import Clock
from helexa.bench.request_records_and_metrics import Objectives
from helexa.bench.scenarios.load import Concurrency, Mixed, Rate
from helexa.bench.scenarios.scenario import Scenario
from helexa.bench.scenarios.single import Cancel, Single, Swap
from helexa.bench.store.database import Reader
from helexa.bench.store.writer import Store
from helexa.bench.sweep_and_warm_up import Sweep, SweepReport

SAMPLES = 2
GOOD = Objectives(ttft_s=1.0)
SCENARIOS: list[Scenario] = [
    Single(50, 8, "cold"),
    Single(50, 8, "warm"),
    Cancel(50, 8),
    Mixed(200, 3.0, 8),
    Concurrency(2, 3.0, 50, 8, GOOD),
    Rate(2.0, "poisson", 3.0, 50, 8, GOOD),
    Swap(50, 8),
]


class CalendarClock(VirtualClock):
    """A virtual monotonic clock with the machine's wall clock."""

    def calendar_ms(self) -> int:
        return Clock().calendar_ms()


def two_sweeps(path: Path) -> tuple[SweepReport, SweepReport]:
    """Run a sweep twice and return both reports."""

    def script_for(number: int, at: float) -> Script:
        return streamed_script(0.5, node.bodies[number]["max_tokens"], 0.1)

    node = ScriptedNode(script_for)
    config = BenchConfig.model_validate({"bench": {"iteration_pause_secs": 1}})

    async def work() -> tuple[SweepReport, SweepReport]:
        async with connection_to(node) as connection:
            with Store(path) as store:
                first, second = (Sweep(config, store, CalendarClock(), lambda configuration: SAMPLES) for _ in range(2))
                return await first.run([connection], SCENARIOS), await second.run([connection], SCENARIOS)

    return run(work())


def stored_values(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return all stored rows without keys and times, and the runs' wall-clock start times."""
    with Reader(path) as reader:
        runs = sorted(reader.runs(), key=lambda row: row.id)
        parts = [[row, *reader.requests(row.id), *reader.telemetry(row.id)] for row in runs]
    measured = [
        {name: to_the_microsecond(value) for name, value in asdict(row).items() if name not in ("key", "started_ms")}
        for row in itertools.chain(*parts)
    ]
    return measured, [row.started_ms for row in runs]


def to_the_microsecond(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


@pytest.fixture
def restless_calendar(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the wall clock jump at every call: one hour back, 25 hours ahead, two days back, a day ahead."""
    real, jumps = time.time_ns, itertools.cycle([-3_600, 90_000, -172_800, 86_000])
    set_to = 0

    def time_ns() -> int:
        nonlocal set_to
        set_to += next(jumps) * 10**9
        return real() + set_to

    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", time_ns)
        patch.setattr(time, "time", lambda: time_ns() / 1e9)
        yield


def test_jumps_of_the_wall_clock_change_no_metric_and_lose_no_sample(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    steady, jumping = tmp_path / "steady.sqlite", tmp_path / "jumping.sqlite"
    two_sweeps(steady)
    request.getfixturevalue("restless_calendar")
    first, second = two_sweeps(jumping)
    assert (first.measured, first.failed, first.skipped) == (SAMPLES * len(SCENARIOS), 0, 0)
    assert (second.measured, second.failed, second.skipped) == (0, 0, len(SCENARIOS))
    (expected, _), (measured, started) = stored_values(steady), stored_values(jumping)
    assert started != sorted(started)  # the wall clock did jump
    assert measured == expected
    with Reader(jumping) as reader:
        assert [configuration.samples for configuration in reader.configurations()] == [SAMPLES] * len(SCENARIOS)
        assert all(configuration.first_ms < configuration.last_ms for configuration in reader.configurations())
        assert len(reader.latest_configurations()) == len(SCENARIOS)


def test_sweep_over_all_scenarios_stores_the_measured_values(tmp_path: Path) -> None:
    two_sweeps(tmp_path / "bench.sqlite")
    with Reader(tmp_path / "bench.sqlite") as reader:
        runs = {row.scenario_kind: row for row in reader.runs()}
        roles = {kind: [entry.role for entry in reader.requests(row.id)] for kind, row in runs.items()}
        moments = {kind: [entry.at_s for entry in reader.telemetry(row.id)] for kind, row in runs.items()}
    about = pytest.approx
    assert all(
        row.ttft_s == about(0.5) for kind, row in runs.items() if kind != "cancel"
    )  # a cancelled request has no TTFT
    assert (runs["single"].tpot_s, runs["single"].completion_tokens) == (about(0.1), 8)
    assert (runs["mixed"].requests, runs["mixed"].completion_tokens) == (6, 1)  # only probes are measured, not the load
    assert sorted(set(roles["mixed"])) == ["load", "probe"]
    assert (runs["swap"].unload_s, runs["swap"].load_s) == (about(0.5), about(4.0))
    assert (runs["concurrency"].concurrency, runs["concurrency"].goodput_share) == (2, 1.0)
    assert runs["cancel"].release_s == about(0.0, abs=0.01)
    assert moments["swap"] == about([0, 1, 2, 3, 4, 5, 5.7])  # once a second and at the end
