"""Fleet state, and its changes by polls, loads and reloads of the configuration."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually, open_client, running_cortex
from helexa.core.node_reports import Discovery, Health, ModelInfo
from helexa.cortex.config import NeuronSection
from helexa.cortex.fleet import node_client
from helexa.cortex.fleet.fleet import MAX_SILENCE_SECS, Fleet
from helexa.cortex.fleet.fleet_view import Node, Report
from helexa.cortex.fleet.node_client import MAX_MODELS, reachable_url
from helexa.cortex.fleet.poller import Poller, pause_secs
from ports import free_port

M = ModelInfo(id="M")


@pytest.fixture
def fleet() -> Fleet:
    return Fleet([NeuronSection(name="n1", endpoint="http://n1")])


def report(*models: ModelInfo, **fields: Any) -> Report:
    return Report(models={info.id: info for info in models}, **fields)


def test_three_missed_polls_mark_a_node_down(fleet: Fleet) -> None:
    assert not fleet.node("n1").healthy
    fleet.answered("n1", report(M), 0.0)
    for misses in (1, 2):
        fleet.missed("n1", "slow")
        assert fleet.node("n1").healthy, misses
    fleet.answered("n1", report(M), 0.0)
    for expected in (True, True, False, False):
        fleet.missed("n1", "slow")
        assert fleet.node("n1").healthy is expected
    assert "M" in fleet.node("n1").models
    fleet.answered("n1", report(M), 0.0)
    assert fleet.node("n1").healthy


def test_node_that_misses_polls_is_down_only_when_its_last_sign_of_life_is_too_old(fleet: Fleet) -> None:
    fleet.answered("n1", report(M), 100.0)
    for _ in range(9):
        fleet.missed("n1", "slow", alive_since=99.0)
    node = fleet.node("n1")
    assert (node.healthy, node.is_unresponsive) == (True, True)
    assert pause_secs(node, 10.0, 0.5) == 60.0
    fleet.missed("n1", "slow", alive_since=101.0)
    assert not fleet.node("n1").healthy


class Response:
    last_received_at = 0.0


def test_received_response_bytes_show_that_a_node_is_alive() -> None:
    now = 1000.0
    fleet = Fleet([NeuronSection(name="n1", endpoint="http://n1")], clock=lambda: now)
    assert not fleet.is_answering("n1")
    with fleet.request("n1", "M") as running:
        assert fleet.is_answering("n1") and fleet.heard_at("n1") == float("-inf")
        running.response = Response()
        running.response.last_received_at = 1200.0
        assert fleet.heard_at("n1") == 1200.0
        now = 1200.0 + MAX_SILENCE_SECS - 1
        assert fleet.is_answering("n1")
        now += 1
        with fleet.request("n1", "M"):  # a new request is no sign of life
            assert not fleet.is_answering("n1")  # silent for too long: perhaps it hangs
    assert not fleet.is_answering("n1")
    with fleet.request("n1", "M"):
        assert fleet.is_answering("n1")
    assert fleet.heard_at("n1") == 1200.0


def test_new_node_is_unhealthy_after_one_missed_poll(fleet: Fleet) -> None:
    fleet.missed("n1", "refused")
    assert not fleet.node("n1").healthy


def test_models_that_a_node_no_longer_reports_are_removed(fleet: Fleet) -> None:
    fleet.answered("n1", report(M), 0.0)
    fleet.answered("n1", report(), 0.0)
    assert fleet.node("n1").models == {}


def test_poll_that_began_before_a_model_was_loaded_does_not_remove_the_model(fleet: Fleet) -> None:
    poll_time = time.monotonic()
    fleet.loaded("n1", M, "http://n1:9")
    fleet.answered("n1", report(), poll_time)
    assert fleet.node("n1").url("M") == "http://n1:9"
    assert "M" in fleet.node("n1").models
    fleet.answered("n1", report(), time.monotonic() + 1)
    assert fleet.node("n1").models == {}


def test_node_report_begun_during_a_load_is_ignored_after_the_load(fleet: Fleet) -> None:
    loading = ModelInfo(id="M", status="loading")
    now = time.monotonic()
    fleet.answered("n1", report(health=Health()), now)
    fleet.answered("n1", report(loading), now + 1)
    assert not fleet.view().loaded_at
    fleet.loaded("n1", M, "http://n1")
    fleet.answered("n1", report(loading), now)
    assert fleet.node("n1").models == {"M": M}
    fleet.answered("n1", report(loading), now + 60)
    assert fleet.node("n1").models == {"M": loading}
    elsewhere = Fleet([NeuronSection(name="n1", endpoint="http://n1")])  # the model is loaded by another gateway
    for at, models in ((1.0, ()), (2.0, (loading,)), (3.0, (M,)), (4.0, (M,))):
        elsewhere.answered("n1", report(*models, health=Health()), at)
    assert elsewhere.view().loaded_at == {("n1", "M"): 3.0}


def test_discovery_and_health_missing_in_a_later_node_report_are_kept(fleet: Fleet) -> None:
    discovery, health = Discovery(hostname="h", os="Linux"), Health(uptime_secs=3)
    fleet.answered("n1", report(discovery=discovery, health=health), 0.0)
    fleet.answered("n1", report(), 0.0)
    assert (fleet.node("n1").discovery, fleet.node("n1").health) == (discovery, health)


def test_requests_of_the_gateway_are_not_counted_twice_in_the_load_of_a_node(fleet: Fleet) -> None:
    busy = Health.model_validate({"models": [{"id": "M", "in_flight": 2, "queue_depth": 1}]})
    with fleet.request("n1", "M"), fleet.request("n1", "M"):
        fleet.answered("n1", report(M, health=busy), 0.0)
        view = fleet.view()
        assert view.load(view.nodes[0], "M") == 3  # two of this gateway, one of another client
    view = fleet.view()
    assert view.load(view.nodes[0], "M") == 1
    assert view.in_flight == {}


def test_failed_request_is_no_longer_counted_as_running(fleet: Fleet) -> None:
    with pytest.raises(RuntimeError), fleet.request("n1", "M"):
        raise RuntimeError
    assert fleet.view().in_flight == {}


def test_fleet_view_taken_earlier_does_not_change_when_the_fleet_changes(fleet: Fleet) -> None:
    view = fleet.view()
    fleet.answered("n1", report(M), 0.0)
    with fleet.request("n1", "M"), fleet.load("n1", "M"):
        assert not view.nodes[0].healthy
        assert view.loading == frozenset()


@pytest.mark.parametrize(
    ("reported_url", "reachable"),
    [
        ("http://localhost:9000/", "http://far:9000"),
        ("http://127.0.0.1:9000/base/", "http://far:9000/base"),
        ("http://0.0.0.0:9000", "http://far:9000"),
        ("http://[::1]:9000", "http://far:9000"),
        ("https://FAR/base?query", "https://far/base"),
        ("https://listed", "https://listed"),
        ("http://[fe80::2]:9000", "http://[fe80::2]:9000"),
    ],
)
def test_loopback_address_in_a_model_url_is_replaced_by_the_host_of_the_node(reported_url: str, reachable: str) -> None:
    assert reachable_url(reported_url, "http://far:13131", {"listed", "fe80::2"}) == reachable


@pytest.mark.parametrize(
    ("endpoint", "reported_url", "problem"),
    [
        ("http://far:13131", "http://169.254.169.254/latest", "'169.254.169.254' is not the host of the endpoint"),
        ("http://far:13131", "http://far.evil:13131", "'far.evil' is not the host of the endpoint"),
        ("http://far:13131", "http://far@evil", "'evil' is not the host of the endpoint"),
        ("https://far", "http://far", "the reported URL is http, but"),
        ("https://far", "http://localhost:13131", "the reported URL is http, but"),
        ("http://far:13131", "ftp://far", "is not an http"),
        ("http://far:13131", "nonsense", "is not an http"),
        ("http://far:13131", "http://[", "is not an http"),
        ("http://far:13131", "http://localhost:99999", "is not an http"),
    ],
)
def test_model_url_with_a_host_that_is_not_the_nodes_is_rejected(
    endpoint: str, reported_url: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        reachable_url(reported_url, endpoint)


async def test_bearer_and_prompts_are_sent_only_to_allowed_hosts(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeNode("other").holds("Org/M").serving() as other_host:
        node.endpoint = other_host.url.replace("127.0.0.1", "127.0.0.2")
        section: dict[str, Any] = {"name": "n1", "endpoint": node.url, "bearer": "s3cret"}
        async with running_cortex(node, settings={"neurons": [section]}) as cortex:
            assert (await cortex.ask())[0] == 200
        assert len(node.bodies) == 1 and not other_host.bodies and not other_host.polled_paths
        assert (
            "the reported host '127.0.0.2' is not the host of the endpoint; add the reported host to allowed_hosts"
            in caplog.text
        )
        section["allowed_hosts"] = ["127.0.0.2"]
        async with running_cortex(node, settings={"neurons": [section]}) as cortex:
            assert cortex.gateway.fleet.node("n1").url("Org/M") == node.endpoint


async def test_changed_setting_allowed_hosts_applies_at_once() -> None:
    async with FakeNode("a", endpoint="http://far:1").holds("A").serving() as a, open_client() as client:
        fleet = Fleet([neuron("n", a.url)])
        poller = Poller(fleet, client, 1.0)
        for hosts, url in (((), a.url), (("far",), "http://far:1"), ((), a.url)):
            fleet.configure([neuron("n", a.url, allowed_hosts=hosts)])
            await poller.poll("n")
            assert fleet.node("n").url("A") == url and fleet.node("n").healthy


async def test_model_url_is_requested_from_the_node_only_after_the_load(node: FakeNode) -> None:
    node.models[0]["status"] = "loading"
    node.endpoint = f"{node.url}/base"
    async with open_client() as client:
        fleet = Fleet([neuron("n", node.url)])
        poller = Poller(fleet, client, 1.0)
        await poller.poll("n")
        assert "/models/Org%2FM/endpoint" not in node.polled_paths
        node.models[0]["status"] = "loaded"
        await poller.poll("n")
        assert fleet.node("n").url("Org/M") == node.endpoint


async def test_node_that_does_not_respond_does_not_delay_polls_of_other_nodes() -> None:
    async with FakeNode("silent").serving() as silent, FakeNode("quick").holds("Org/M").serving() as quick:
        silent.may_answer_polls.clear()
        async with running_cortex(silent, quick, ready=False) as cortex:

            async def quick_is_up() -> bool:
                return (await cortex.get("/health"))["nodes"] == {"healthy": 1, "total": 2}

            await eventually(quick_is_up)
            polls = quick.polled_paths.count("/models")
            await eventually(lambda: quick.polled_paths.count("/models") > polls + 1)
            assert silent.polled_paths.count("/models") == 1  # its first poll still waits
            assert (await cortex.ask())[0] == 200
            silent.may_answer_polls.set()


async def test_node_that_is_down_gets_no_requests_until_it_is_up(node: FakeNode) -> None:
    async with running_cortex(node) as cortex:

        async def status(expected: str) -> bool:
            return (await cortex.get("/health"))["status"] == expected

        node.down = True
        await eventually(lambda: status("degraded"))
        async with cortex.client.post(f"{cortex.url}/v1/completions", json={"model": "Org/M"}) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "5")
            assert (await response.json())["error"]["code"] == "service_unavailable"
        node.down = False
        await eventually(lambda: status("ok"))
        assert (await cortex.ask())[0] == 200


async def test_discovery_and_model_urls_of_a_node_are_requested_once(node: FakeNode) -> None:
    async with running_cortex(node) as cortex:
        await eventually(lambda: node.polled_paths.count("/models") > 4)
        assert (await cortex.ask())[0] == 200
    assert node.polled_paths.count("/discovery") == 1
    assert node.polled_paths.count("/models/Org%2FM/endpoint") == 1


async def test_invalid_model_entry_in_a_node_report_is_skipped(node: FakeNode) -> None:
    node.models += [{"id": "Org/Odd", "status": "meditating"}, {"no": "id"}]
    async with running_cortex(node) as cortex:
        assert [entry["id"] for entry in (await cortex.get("/v1/models"))["data"]] == ["Org/M"]


async def test_node_that_is_down_is_polled_more_often_than_a_healthy_node() -> None:
    late = FakeNode()
    port = free_port()
    late.url = f"http://127.0.0.1:{port}"
    async with running_cortex(late, ready=False, poll_interval_secs=3600) as cortex:
        assert (await cortex.get("/health"))["status"] == "degraded"
        async with late.serving(port):

            async def up() -> bool:
                return (await cortex.get("/health"))["status"] == "ok"

            await eventually(up)


def neuron(name: str, endpoint: str = "http://n", **fields: Any) -> NeuronSection:
    return NeuronSection.model_validate({"name": name, "endpoint": endpoint, **fields})


def test_fleet_view_object_is_reused_until_the_fleet_changes(fleet: Fleet) -> None:
    view = fleet.view()
    assert fleet.view() is view
    with fleet.request("n1", "M"):
        assert fleet.view() is view
        assert view.in_flight == {("n1", "M"): 1} and view.running("n1") == {"M": 1}
    for change in (
        lambda: fleet.answered("n1", report(M), 0.0),
        lambda: fleet.missed("n1", "slow"),
        lambda: fleet.loaded("n1", M, "http://n1"),
        lambda: fleet.unloaded("n1", "M"),
        lambda: fleet.cordon("n1", True),
        lambda: fleet.transport_failed("n1", "M"),
        lambda: fleet.transport_ok("n1", "M"),
        lambda: fleet.busy("n1", "M"),
        lambda: fleet.configure([]),
    ):
        change()
        assert fleet.view() is not view
        view = fleet.view()
    for state_change in (fleet.load("n1", "M"), fleet.drain("n1", "M")):
        with state_change:
            assert fleet.view().loading | fleet.view().draining == {("n1", "M")}
        assert fleet.view().loading | fleet.view().draining == frozenset()


def test_mappings_in_a_fleet_view_are_read_only(fleet: Fleet) -> None:
    for live in (fleet.view().in_flight, fleet.view().used_at, fleet.view().loaded_at):
        with pytest.raises(TypeError):
            live["n1", "M"] = 1  # type: ignore[index]


def test_reload_of_the_configuration_keeps_the_state_of_remaining_nodes() -> None:
    fleet = Fleet([neuron("stays"), neuron("moves"), neuron("goes")])
    for name in ("stays", "moves", "goes"):
        fleet.answered(name, report(M), 0.0)
    with fleet.request("goes", "M"), fleet.load("goes", "M"), fleet.drain("goes", "M"):
        fleet.configure([neuron("stays"), neuron("comes"), neuron("moves", "http://elsewhere")])
        assert [(node.name, node.healthy) for node in fleet.view().nodes] == [
            ("stays", True),
            ("comes", False),
            ("moves", False),
        ]
        fleet.answered("goes", report(M), 0.0)
        fleet.missed("goes", "gone")
        fleet.loaded("goes", M, "http://goes")
        fleet.unloaded("goes", "M")
        fleet.transport_failed("goes", "M")
        fleet.transport_ok("goes", "M")
        fleet.busy("goes", "M")
    view = fleet.view()
    assert len(view.nodes) == 3 and not view.in_flight and not view.open | view.cooling_down
    with pytest.raises(KeyError):
        fleet.cordon("goes", True)


def test_node_cordoned_by_an_admin_stays_cordoned_after_an_unrelated_reload() -> None:
    fleet = Fleet([neuron("a"), neuron("b", cordoned=True)])

    def cordoned() -> list[bool]:
        return [node.cordoned for node in fleet.view().nodes]

    fleet.cordon("a", True)
    fleet.cordon("b", False)
    fleet.configure([neuron("a"), neuron("b", cordoned=True)])
    assert cordoned() == [True, False]
    fleet.configure([neuron("a", cordoned=True), neuron("b", cordoned=False)])
    assert cordoned() == [True, False]
    fleet.configure([neuron("a", cordoned=False), neuron("b", cordoned=True)])
    assert cordoned() == [False, True]


def test_missed_poll_keeps_the_load_and_model_url_of_a_node_for_a_while(fleet: Fleet) -> None:
    busy = Health.model_validate({"models": [{"id": "M", "in_flight": 7}]})
    fleet.answered("n1", report(M, health=busy, urls={"M": "http://n1:9"}), 0.0)
    for load in (7, 7, 0):
        fleet.missed("n1", "slow")
        view = fleet.view()
        assert (view.load(view.nodes[0], "M"), view.nodes[0].url("M")) == (load, "http://n1:9")


async def test_model_urls_are_requested_again_after_a_missed_poll() -> None:
    async with FakeNode("a").holds("A").serving() as a, open_client() as client:
        fleet = Fleet([neuron("n", a.url)])
        poller = Poller(fleet, client, 1.0)
        a.endpoint = "http://localhost:1"
        for _ in range(2):
            await poller.poll("n")
        assert a.polled_paths.count("/models/A/endpoint") == 1
        a.endpoint = "http://localhost:2"
        fleet.missed("n", "away")
        assert fleet.node("n").url("A") == "http://127.0.0.1:1"
        await poller.poll("n")
        assert fleet.node("n").url("A") == "http://127.0.0.1:2"
        assert a.polled_paths.count("/discovery") == 2


async def test_wait_for_an_empty_node_ends_when_all_its_requests_have_ended(fleet: Fleet) -> None:
    await fleet.emptied("n1")
    with fleet.request("n1", "M"):
        waits = [asyncio.create_task(fleet.emptied("n1")) for _ in range(2)]
        with fleet.request("n1", "M"), fleet.request("n2", "M"):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not any(wait.done() for wait in waits)
    await asyncio.gather(*waits)


def test_pause_between_polls_of_a_down_node_grows_to_a_limit() -> None:
    node = Node("n", "http://n", healthy=True)
    assert pause_secs(node, 10.0, 0.5) == 10.0
    assert pause_secs(replace(node, misses=1), 10.0, 0.5) == 1.0
    assert pause_secs(replace(node, models={"M": ModelInfo(id="M", status="recovering")}), 10.0, 0.5) == 1.0
    down = [pause_secs(Node("n", "http://n", misses=misses), 10.0, 0.0) for misses in range(12)]
    assert down == [1, 1, 1, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    for misses in range(2000):
        assert 0.5 <= pause_secs(Node("n", "http://n", misses=misses), 10.0, 1.0) <= 30
    assert pause_secs(Node("n", "http://n", misses=9), 0.05, 0.0) == pytest.approx(1.5)


@asynccontextmanager
async def polled(*neurons: NeuronSection) -> AsyncIterator[Fleet]:
    fleet = Fleet(neurons)
    async with open_client() as client:
        poller = asyncio.create_task(Poller(fleet, client, 0.02).run())
        try:
            yield fleet
        finally:
            poller.cancel()
            await asyncio.gather(poller, return_exceptions=True)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("poll ")]


async def test_poller_follows_changes_of_the_configured_nodes() -> None:
    async with (
        FakeNode("a").holds("A").serving() as a,
        FakeNode("b").holds("B").serving() as b,
        polled(neuron("n", a.url)) as fleet,
    ):

        def holds(name: str, *models: str) -> bool:
            return fleet.node(name).healthy and list(fleet.node(name).models) == list(models)

        await eventually(lambda: holds("n", "A"))
        a.may_answer_polls.clear()
        polls = len(a.polled_paths)
        await eventually(lambda: len(a.polled_paths) > polls)  # a poll is in progress when the endpoint changes
        fleet.configure([neuron("n", b.url)])
        a.may_answer_polls.set()
        await eventually(lambda: holds("n", "B"))
        polls = len(a.polled_paths)
        fleet.configure([neuron("n", b.url), neuron("m", a.url)])
        await eventually(lambda: holds("m", "A"))
        assert holds("n", "B") and len(a.polled_paths) > polls
        fleet.configure([])
        await eventually(lambda: not any(task.get_name() in ("poll n", "poll m") for task in asyncio.all_tasks()))


async def test_unexpected_exception_for_one_node_does_not_stop_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeNode("a").holds("A").serving() as a, polled(neuron("bad\n", a.url), neuron("n", a.url)) as fleet:
        answered = fleet.answered

        def fail_for_one(name: str, node_report: Report, began: float) -> None:
            if name == "bad\n":
                raise ZeroDivisionError
            answered(name, node_report, began)

        monkeypatch.setattr(fleet, "answered", fail_for_one)
        await eventually(lambda: fleet.node("bad\n").misses > 3 and fleet.node("n").healthy)


async def test_nodes_that_hang_do_not_delay_polls_of_other_nodes() -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(FakeNode(f"n{i}").holds("M").serving()) for i in range(5)]
        for hung in nodes[:3]:
            hung.may_answer_polls.clear()
        fleet = await stack.enter_async_context(polled(*(neuron(node.name, node.url) for node in nodes)))
        for model in ("X", "Y", "Z"):
            for live in nodes[3:]:
                live.holds(model)
            await eventually(lambda model=model: all(model in fleet.node(live.name).models for live in nodes[3:]))
        assert [hung.polled_paths for hung in nodes[:3]] == [["/models"]] * 3
        for hung in nodes:
            hung.may_answer_polls.set()


async def test_gateway_keeps_at_most_the_maximum_number_of_models_per_node() -> None:
    async with FakeNode().holds(*(f"M{i}" for i in range(MAX_MODELS + 50))).serving() as node, polled() as fleet:
        fleet.configure([neuron("n", node.url)])
        await eventually(lambda: fleet.node("n").healthy)
        assert len(fleet.node("n").models) == MAX_MODELS


async def test_bearer_of_a_node_is_sent_with_every_poll(node: FakeNode) -> None:
    async with polled(neuron("n", node.url, bearer="s3cret")) as fleet:
        await eventually(lambda: fleet.node("n").healthy)
    assert {"/models", "/health", "/discovery", "/models/Org%2FM/endpoint"} <= set(node.polled_paths)
    assert set(node.authorizations) == {"Bearer s3cret"}
    assert "s3cret" not in repr(fleet.view())


@pytest.mark.parametrize("down", [False, True])
async def test_result_of_a_poll_of_a_replaced_endpoint_is_ignored(down: bool) -> None:
    async with FakeNode("a", down=down).holds("A").serving() as a, open_client() as client:
        fleet = Fleet([neuron("n", a.url)])
        a.may_answer_polls.clear()
        poll = asyncio.create_task(Poller(fleet, client, 1.0).poll("n"))
        await eventually(lambda: a.polled_paths)
        fleet.configure([neuron("n", "http://elsewhere")])
        a.may_answer_polls.set()
        await poll
        node = fleet.node("n")
        assert (node.healthy, node.misses, node.models) == (False, 0, {})


async def test_hanging_poll_is_cancelled_when_its_node_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_client, "POLL_TIMEOUT_SECS", 3600.0)

    def polls() -> int:
        return sum(task.get_name() == "poll n" for task in asyncio.all_tasks())

    async with FakeNode("a").serving() as a, polled(neuron("n", a.url)) as fleet:
        a.may_answer_polls.clear()
        await eventually(lambda: a.polled_paths)
        assert polls() == 1
        fleet.configure([])
        await eventually(lambda: polls() == 0)
        fleet.configure([neuron("n", a.url)])
        await eventually(lambda: polls() == 1)
        a.may_answer_polls.set()
