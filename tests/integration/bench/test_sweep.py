"""Sweeps into a real database while the machine's wall clock jumps."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench.scripted_node import ScriptedNode, connection_to
from bench.scripted_server import Script, ScriptedServer, client_of, streamed_script
from bench.virtual_time import VirtualClock, run
from helexa.bench.client import TargetError
from helexa.bench.config import BenchConfig, TargetSection
from helexa.bench.host_build_and_model import Build, TargetKind
from helexa.bench.prompts_and_load_generators import Clock
from helexa.bench.request_records_and_metrics import Objectives
from helexa.bench.scenarios.load import Concurrency, Mixed, Rate
from helexa.bench.scenarios.scenario import Scenario
from helexa.bench.scenarios.single import Cancel, Single, Swap
from helexa.bench.servers import connect
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


class Facts(ScriptedServer):
    """A server without a model that answers GET requests to `path` with `statuses` in order."""

    def __init__(self, path: str, body: dict[str, Any], statuses: list[int]) -> None:
        super().__init__(())
        self.path, self.body, self.statuses = path, body, statuses

    def routes(self) -> list[web.RouteDef]:
        return [web.get(self.path, self._facts)]

    async def _facts(self, request: web.Request) -> web.Response:
        return web.json_response(self.body, status=self.statuses.pop(0))


@pytest.mark.parametrize(
    ("kind", "path", "body", "engine"),
    [
        ("cortex", "/openapi.json", {"info": {"version": "1.2"}}, "cortex"),
        ("openai", "/props", {"build_info": "1.2"}, "llama.cpp"),
        ("openai", "/version", {"version": "1.2"}, "vllm"),
    ],
)
def test_temporary_error_of_a_version_request_raises_instead_of_naming_another_build(
    kind: TargetKind, path: str, body: dict[str, Any], engine: str
) -> None:
    async def work() -> None:
        async with client_of(Facts(path, body, [200, 503, 429, 200, 404])) as client:
            section = TargetSection(name="server", kind=kind, endpoint=client.endpoint)
            server = connect(section, client.session).server
            known = await server.identity()
            assert known.build == Build(engine, "1.2", version="1.2")
            for status in (503, 429):
                with pytest.raises(TargetError, match=f"{path} answered HTTP {status}"):
                    await server.identity()
            assert await server.identity() == known
            assert (await server.identity()).build == Build(kind, "external")  # the server has no such route

    run(work())


class NodeWithFacts(ScriptedNode):
    """A node whose third `/discovery` request fails."""

    requests = 0

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/discovery", self._discovery)]

    async def _discovery(self, request: web.Request) -> web.Response:
        self.requests += 1
        facts = {"hostname": "beast", "os": "Linux", "kernel": "6.1", "cpu": "x", "cpu_cores": 8}
        return web.json_response(facts, status=503 if self.requests == 3 else 200)


def test_failed_discovery_after_a_sample_stores_the_sample_under_the_known_host(tmp_path: Path) -> None:
    node = NodeWithFacts(lambda number, at: streamed_script(0.5, 8, 0.1))
    config = BenchConfig.model_validate({"bench": {"iteration_pause_secs": 1}})
    path = tmp_path / "bench.sqlite"

    async def work() -> list[SweepReport]:
        async with connection_to(node) as connection:
            with Store(path) as store:
                sweeps = [Sweep(config, store, CalendarClock(), lambda configuration: 3) for _ in range(2)]
                return [await sweep.run([connection], [Single(50, 8, "cold")]) for sweep in sweeps]

    first, second = run(work())
    assert (first.measured, list(first.unreachable)) == (2, ["node"])
    assert (second.measured, second.unreachable) == (1, {})
    with Reader(path) as reader:
        assert [row.hostname for row in reader.runs()] == ["beast"] * 3
