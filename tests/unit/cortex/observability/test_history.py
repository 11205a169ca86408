"""The last hour of the fleet: values per interval, sums per node and model, and bounds."""

from typing import Any

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually
from helexa.core.node_reports import DeviceHealth, Discovery, Health, ModelLoad
from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.cortex.fleet_history import INTERVAL_SECS, INTERVALS, MAX_NAMES, By, History
from helexa.cortex.ledger.activity_and_usage_totals import Activity

START = 1_000_000 * INTERVAL_SECS


class Clock:
    now = float(START)

    def __call__(self) -> float:
        return self.now


def history_of(*nodes: Node) -> tuple[History, Clock]:
    clock = Clock()
    return History(lambda: FleetView(nodes), clock), clock


def finished(secs: float, tokens: int, ttft_ms: float, model: str = "M", node: str = "n1") -> Activity:
    """Return a request that began at START."""
    activity = Activity("r", START * 1000, "/v1/chat/completions", model, 200, secs * 1000, node=node)
    activity.completion, activity.ttft_ms = tokens, ttft_ms
    return activity


def series(history: History, by: By) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in history.report(by, MAX_NAMES)["series"]}


def test_tokens_of_a_request_are_spread_over_the_time_of_their_generation() -> None:
    history, clock = history_of()
    clock.now += 44
    history.observe(finished(secs=40, tokens=400, ttft_ms=10_000))
    clock.now = START + 60
    fleet = series(history, "fleet")[""]
    assert fleet["tokens_per_second"][-4:] == [4.4, 13.3, 8.9, 0.0]
    assert fleet["first_token_ms"][-4:] == [None, None, 10_000, None]


def test_history_reports_only_complete_intervals_since_the_start() -> None:
    history, clock = history_of()
    history.observe(finished(secs=1, tokens=30, ttft_ms=0))
    report = history.report("fleet", 1)
    assert report["end"] == START and report["series"][0]["tokens_per_second"] == [None] * (INTERVALS - 1)
    clock.now += INTERVAL_SECS
    assert series(history, "fleet")[""]["tokens_per_second"][-2:] == [None, 2.0]


def test_history_sums_requests_per_node_and_per_model() -> None:
    history, clock = history_of()
    for node, model in (("n1", "M"), ("n1", "N"), ("n2", "N")):
        history.observe(finished(secs=1, tokens=15, ttft_ms=100, node=node, model=model))
    clock.now += INTERVAL_SECS
    assert {name: one["tokens_per_second"][-1] for name, one in series(history, "node").items()} == {"n1": 2, "n2": 1}
    assert {name: one["tokens_per_second"][-1] for name, one in series(history, "model").items()} == {"M": 1, "N": 2}


def test_history_has_the_longest_queue_of_an_interval_and_the_memory_of_gpus_or_host() -> None:
    gpu = DeviceHealth(index=0, vram_used_mb=1000, vram_free_mb=3000)
    loads = [ModelLoad(id="M", in_flight=2, queue_depth=3)]
    first = Node("n1", "http://n1", healthy=True, health=Health(devices=[gpu], models=loads))
    second = Node("n2", "http://n2", healthy=True, health=Health(memory_total_mb=8000, memory_free_mb=6500))
    history, clock = history_of(first, second)
    history.sample()
    loads[0].queue_depth, loads[0].in_flight = 1, 4
    history.sample()
    clock.now += INTERVAL_SECS
    by_node = series(history, "node")
    assert [by_node["n1"][name][-1] for name in ("queued", "running")] == [3, 4]
    assert [by_node[name]["memory_used_mb"][-1] for name in ("n1", "n2")] == [1000, 1500]
    fleet = series(history, "fleet")[""]
    assert (fleet["memory_used_mb"][-1], fleet["memory_total_mb"][-1]) == (2500, 12_000)
    assert fleet["memory_used_mb"][-2] is None


def test_history_values_older_than_an_hour_are_forgotten() -> None:
    history, clock = history_of(
        Node("n1", "http://n1", healthy=True, health=Health(memory_total_mb=8, memory_free_mb=6))
    )
    history.sample()
    history.observe(finished(secs=1, tokens=30, ttft_ms=0))
    clock.now += INTERVAL_SECS * (INTERVALS - 1)
    assert series(history, "node")["n1"]["tokens_per_second"][0] == 2.0
    clock.now += INTERVAL_SECS
    assert series(history, "node") == {}
    clock.now -= 10 * INTERVAL_SECS  # a clock that is set back changes nothing
    history.observe(finished(secs=1, tokens=30, ttft_ms=0))
    assert set(series(history, "fleet")[""]["tokens_per_second"]) == {0.0}


def test_history_report_merges_names_beyond_the_requested_number_into_one_series() -> None:
    history, clock = history_of()
    for number in range(4):
        history.observe(finished(secs=1, tokens=15 * (number + 1), ttft_ms=100 * number, model=f"m{number}"))
    clock.now += INTERVAL_SECS
    first, second, others = history.report("model", 2)["series"]
    assert [first["name"], second["name"], others["name"]] == ["m3", "m2", None]
    assert (others["tokens_per_second"][-1], others["first_token_ms"][-1]) == (3.0, 50.0)


def test_history_keeps_a_limited_number_of_model_names_and_drops_idle_models() -> None:
    history, clock = history_of()
    for number in range(MAX_NAMES + 5):
        history.observe(finished(secs=1, tokens=15, ttft_ms=0, model=f"m{number}"))
    clock.now += INTERVAL_SECS
    assert len(series(history, "model")) == MAX_NAMES
    assert series(history, "fleet")[""]["tokens_per_second"][-1] == MAX_NAMES + 5
    clock.now += INTERVAL_SECS * INTERVALS
    history.observe(finished(secs=1, tokens=15, ttft_ms=0, model="new"))
    assert [*series(history, "model")] == ["new"]


async def test_history_endpoint_returns_the_samples_of_a_running_gateway(cortex: Cortex, node: FakeNode) -> None:
    await cortex.ask()
    report = await cortex.get("/api/history?by=node")
    assert report["interval_secs"] == INTERVAL_SECS
    await eventually(lambda: cortex.gateway.history.report("model", 1)["series"])
    assert [one["name"] for one in (await cortex.get("/api/history?by=model"))["series"]] == ["Org/M"]
    for query in ("by=key", "limit=0", "limit=51", "limit=x"):
        async with cortex.client.get(f"{cortex.url}/api/history?{query}") as response:
            assert response.status == 400


def test_history_counts_the_memory_of_two_nodes_on_one_machine_once() -> None:
    health = Health(memory_free_mb=1000, memory_total_mb=4000)

    def on(name: str, machine: str) -> Node:
        facts = Discovery(hostname="h", os="Linux", machine=machine)
        return Node(name, f"http://{name}", polled=True, healthy=True, discovery=facts, health=health)

    history, clock = history_of(on("a", "m1"), on("b", "m1"), on("c", "m2"))
    history.sample()
    clock.now += INTERVAL_SECS
    assert series(history, "fleet")[""]["memory_total_mb"][-1] == 8000
    assert {name: one["memory_used_mb"][-1] for name, one in series(history, "node").items()} == {
        "a": 3000,
        "b": 3000,
        "c": 3000,
    }
