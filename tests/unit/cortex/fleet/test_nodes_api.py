"""`/api/nodes` over a socket, with a fleet that is not polled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from cortex.running_gateway import eventually, listening
from helexa.core.errors import ApiError
from helexa.core.node_reports import Health, ModelInfo, ModelLoad
from helexa.cortex.config import NeuronSection
from helexa.cortex.fleet.fleet import Fleet, Report
from helexa.cortex.lifecycle.load_queue import LoadReport
from helexa.cortex.routes.access_and_errors import handle_api_error
from helexa.cortex.routes.keys_and_nodes import cordon_node, drain_node, list_nodes, uncordon_node
from helexa.http.listener import Listener


@dataclass
class Api:
    url: str
    client: aiohttp.ClientSession
    fleet: Fleet

    async def post(self, path: str) -> tuple[int, Any]:
        async with self.client.post(f"{self.url}/api/nodes/{path}") as response:
            return response.status, await response.json()

    async def nodes(self) -> list[dict[str, Any]]:
        async with self.client.get(f"{self.url}/api/nodes") as response:
            return (await response.json())["nodes"]


@asynccontextmanager
async def serving(*neurons: NeuronSection) -> AsyncIterator[Api]:
    fleet = Fleet(neurons)
    app = Starlette(
        routes=[
            Route("/api/nodes", list_nodes),
            Route("/api/nodes/{name:path}/cordon", cordon_node, methods=["POST"]),
            Route("/api/nodes/{name:path}/uncordon", uncordon_node, methods=["POST"]),
            Route("/api/nodes/{name:path}/drain", drain_node, methods=["POST"]),
        ],
        exception_handlers={ApiError: handle_api_error},
    )
    app.state.gateway = SimpleNamespace(fleet=fleet, lifecycle=SimpleNamespace(loads=LoadReport))
    async with listening(Listener(app)) as url, aiohttp.ClientSession() as client:
        yield Api(url, client, fleet)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    section = {"name": "n1", "endpoint": "http://n1", "bearer": "s3cret"}
    async with serving(NeuronSection.model_validate(section)) as api:
        api.fleet.answered("n1", Report(models={"M": ModelInfo(id="M")}), 0.0)
        yield api


async def test_node_is_cordoned_and_uncordoned_through_the_api(api: Api) -> None:
    state = {"name": "n1", "cordoned": True, "in_flight": 0, "loading": 0}
    assert await api.post("n1/cordon") == (200, state)
    assert api.fleet.node("n1").cordoned
    assert await api.post("n1/cordon") == (200, state)
    assert await api.post("n1/uncordon") == (200, state | {"cordoned": False})
    assert not api.fleet.node("n1").cordoned


async def test_drain_request_responds_when_the_node_has_no_more_requests(api: Api) -> None:
    with api.fleet.request("n1", "M"):
        with api.fleet.load("n1", "Other"):
            drain = asyncio.create_task(api.post("n1/drain"))
            await eventually(lambda: api.fleet.node("n1").cordoned)
        assert await api.post("n1/drain?wait_secs=0") == (
            200,
            {"name": "n1", "cordoned": True, "in_flight": 1, "loading": 0},
        )
        assert not drain.done()
    assert await drain == (200, {"name": "n1", "cordoned": True, "in_flight": 0, "loading": 0})


async def test_entry_of_a_down_node_has_no_memory_and_no_speed(api: Api) -> None:
    load = ModelLoad(id="M", tok_s_decode=5.0)
    health = Health(memory_free_mb=100, memory_total_mb=200, models=[load])
    api.fleet.answered("n1", Report(models={"M": ModelInfo(id="M")}, health=health), 0.0)
    [node] = await api.nodes()
    assert (node["memory_free_mb"], node["load"][0]["tok_s_decode"]) == (100, 5.0)
    for _ in range(3):
        api.fleet.missed("n1", "gone")
    [node] = await api.nodes()
    assert not node["healthy"]
    assert not {"memory_free_mb", "load", "devices"} & node.keys()


async def test_node_list_shows_running_requests_and_no_secret(api: Api) -> None:
    for _ in range(3):
        api.fleet.transport_failed("n1", "M")
    with api.fleet.request("n1", "M"), api.fleet.load("n1", "New"), api.fleet.drain("n1", "Old"):
        [node] = await api.nodes()
    expected = {
        "name": "n1",
        "endpoint": "http://n1",
        "kind": "neuron",
        "healthy": True,
        "cordoned": False,
        "misses": 0,
        "in_flight": {"M": 1},
        "loading": ["New"],
        "draining": ["Old"],
        "failing": ["M"],
    }
    assert node.items() >= expected.items()
    assert "s3cret" not in str(node)
    [node] = await api.nodes()
    assert (node["in_flight"], node["loading"], node["draining"]) == ({}, [], [])


@pytest.mark.parametrize("verb", ["cordon", "uncordon", "drain"])
async def test_request_for_an_unknown_node_is_404(api: Api, verb: str) -> None:
    status, body = await api.post(f"nobody/{verb}")
    assert (status, body["error"]["code"]) == (404, "node_not_found")


@pytest.mark.parametrize("text", ["-1", "601", "9" * 400, "x", "1.5", ""])
async def test_drain_with_invalid_wait_secs_is_rejected_and_does_not_cordon_the_node(api: Api, text: str) -> None:
    status, body = await api.post(f"n1/drain?wait_secs={text}")
    assert (status, body["error"]["param"]) == (400, "wait_secs")
    assert not api.fleet.node("n1").cordoned


async def test_node_name_may_contain_spaces_slashes_and_non_ascii_letters() -> None:
    async with serving(NeuronSection(name="rack 1/é", endpoint="http://n1")) as api:
        assert (await api.post("rack%201%2F%C3%A9/cordon"))[0] == 200
        assert api.fleet.node("rack 1/é").cordoned
