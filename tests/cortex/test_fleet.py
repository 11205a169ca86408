"""The picture of the fleet, and how polls and loads change it."""

import socket
import time
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running import eventually, running_cortex
from helexa.core.fleet import Discovery, Health, ModelInfo
from helexa.cortex.config import NeuronSection
from helexa.cortex.fleet import Fleet, Report
from helexa.cortex.node_client import reachable_url

M = ModelInfo(id="M")


@pytest.fixture
def fleet() -> Fleet:
    return Fleet([NeuronSection(name="n1", endpoint="http://n1")])


def report(*models: ModelInfo, **fields: Any) -> Report:
    return Report(models={info.id: info for info in models}, **fields)


def test_three_misses_in_a_row_take_a_node_down_and_an_answer_brings_it_back(fleet: Fleet) -> None:
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


def test_a_node_that_never_answered_is_not_healthy_after_a_miss(fleet: Fleet) -> None:
    fleet.missed("n1", "refused")
    assert not fleet.node("n1").healthy


def test_models_that_are_no_longer_reported_go(fleet: Fleet) -> None:
    fleet.answered("n1", report(M), 0.0)
    fleet.answered("n1", report(), 0.0)
    assert fleet.node("n1").models == {}


def test_an_answer_older_than_a_load_does_not_undo_it(fleet: Fleet) -> None:
    before = time.monotonic()
    fleet.loaded("n1", M, "http://n1:9")
    fleet.answered("n1", report(), before)
    assert fleet.node("n1").url("M") == "http://n1:9"
    assert "M" in fleet.node("n1").models
    fleet.answered("n1", report(), time.monotonic() + 1)
    assert fleet.node("n1").models == {}


def test_what_was_not_answered_this_time_is_kept(fleet: Fleet) -> None:
    discovery, health = Discovery(hostname="h", os="Linux"), Health(uptime_secs=3)
    fleet.answered("n1", report(discovery=discovery, health=health), 0.0)
    fleet.answered("n1", report(), 0.0)
    assert (fleet.node("n1").discovery, fleet.node("n1").health) == (discovery, health)


def test_requests_are_counted_once_though_the_node_reports_them_too(fleet: Fleet) -> None:
    busy = Health.model_validate({"models": [{"id": "M", "in_flight": 2, "queue_depth": 1}]})
    with fleet.request("n1", "M"), fleet.request("n1", "M"):
        fleet.answered("n1", report(M, health=busy), 0.0)
        view = fleet.view()
        assert view.load(view.nodes[0], "M") == 3  # two of ours, one of somebody else
    view = fleet.view()
    assert view.load(view.nodes[0], "M") == 1
    assert view.in_flight == {}


def test_a_request_that_fails_leaves_no_count_behind(fleet: Fleet) -> None:
    with pytest.raises(RuntimeError), fleet.request("n1", "M"):
        raise RuntimeError
    assert fleet.view().in_flight == {}


def test_a_view_does_not_change(fleet: Fleet) -> None:
    view = fleet.view()
    fleet.answered("n1", report(M), 0.0)
    with fleet.request("n1", "M"), fleet.load("n1", "M"):
        assert not view.nodes[0].healthy
        assert view.loading == frozenset()


@pytest.mark.parametrize(
    ("said", "reachable"),
    [
        ("http://localhost:9000/", "http://far:9000"),
        ("http://127.0.0.1:9000/base/", "http://far:9000/base"),
        ("http://0.0.0.0:9000", "http://far:9000"),
        ("http://[::1]:9000", "http://far:9000"),
        ("https://elsewhere", "https://elsewhere"),
        ("http://[fe80::2]:9000", "http://[fe80::2]:9000"),
        ("ftp://elsewhere", "http://far:13131"),
        ("nonsense", "http://far:13131"),
        ("http://[", "http://far:13131"),
        ("http://localhost:99999", "http://far:13131"),
    ],
)
def test_a_loopback_address_becomes_the_configured_one(said: str, reachable: str) -> None:
    assert reachable_url(said, "http://far:13131") == reachable


async def test_a_silent_node_does_not_delay_the_others() -> None:
    async with FakeNode("silent").serving() as silent, FakeNode("quick").holds("Org/M").serving() as quick:
        silent.may_answer_polls.clear()
        async with running_cortex(silent, quick, ready=False) as cortex:

            async def quick_is_up() -> bool:
                return (await cortex.get("/health"))["nodes"] == {"healthy": 1, "total": 2}

            await eventually(quick_is_up)
            polls = quick.asked.count("/models")
            await eventually(lambda: quick.asked.count("/models") > polls + 1)
            assert silent.asked.count("/models") == 1  # its first poll still waits
            assert (await cortex.ask())[0] == 200
            silent.may_answer_polls.set()


async def test_a_node_that_goes_down_is_left_out_and_comes_back(node: FakeNode) -> None:
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


async def test_discovery_and_the_address_of_a_model_are_asked_once(node: FakeNode) -> None:
    async with running_cortex(node) as cortex:
        await eventually(lambda: node.asked.count("/models") > 4)
        assert (await cortex.ask())[0] == 200
    assert node.asked.count("/discovery") == 1
    assert node.asked.count("/models/Org%2FM/endpoint") == 1


async def test_an_entry_that_cannot_be_read_hides_no_other(node: FakeNode) -> None:
    node.models += [{"id": "Org/Odd", "status": "meditating"}, {"no": "id"}]
    async with running_cortex(node) as cortex:
        assert [entry["id"] for entry in (await cortex.get("/v1/models"))["data"]] == ["Org/M"]


async def test_a_node_that_comes_up_is_noticed_long_before_the_next_regular_poll() -> None:
    late = FakeNode()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    late.url = f"http://127.0.0.1:{port}"
    async with running_cortex(late, ready=False, poll_interval_secs=3600) as cortex:
        assert (await cortex.get("/health"))["status"] == "degraded"
        async with late.serving(port):

            async def up() -> bool:
                return (await cortex.get("/health"))["status"] == "ok"

            await eventually(up)
