"""`/api/models/load` and `/api/models/unload`, and the dry run for one node."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cortex.fake_node import FakeNode, never_end
from cortex.running_gateway import Cortex, eventually, running_cortex

ADMIN = {"authorization": "Bearer root"}
KEYS = [{"key": "root", "account_id": "ops", "role": "admin"}, {"key": "a", "account_id": "alice"}]
MODELS = [{"id": "Org/A", "vram_mb": 6000}, {"id": "Org/B", "vram_mb": 6000}]
SIZES = {"Org/A": 6000, "Org/B": 6000}


@pytest.fixture
async def first() -> AsyncIterator[FakeNode]:
    async with FakeNode(name="n1").with_accelerator(8000, SIZES).serving() as node:
        yield node


@pytest.fixture
async def second() -> AsyncIterator[FakeNode]:
    async with FakeNode(name="n2").with_accelerator(8000, SIZES).serving() as node:
        yield node


@pytest.fixture
async def pair(first: FakeNode, second: FakeNode) -> AsyncIterator[Cortex]:
    settings = {"entitlements": {"keys": KEYS}, "eviction": {"min_residency_secs": 0, "swap_wait_secs": 0}}
    async with running_cortex(first, second, settings=settings, models=MODELS, aliases={"a": "Org/A"}) as cortex:
        yield cortex


async def post(cortex: Cortex, path: str, body: Any, key: str = "root") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with cortex.client.post(cortex.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def load(cortex: Cortex, model: str, node: str | None = None, query: str = "") -> tuple[int, Any]:
    return await post(cortex, f"/api/models/load{query}", {"model": model, "node": node})


async def unload(cortex: Cortex, model: str, node: str) -> tuple[int, Any]:
    return await post(cortex, "/api/models/unload", {"model": model, "node": node})


async def test_load_by_an_admin_uses_the_chosen_node(pair: Cortex, first: FakeNode, second: FakeNode) -> None:
    assert await load(pair, "a", "n2") == (200, {"model": "Org/A", "node": "n2", "status": "loaded"})
    assert [spec["model_id"] for spec in second.loads] == ["Org/A"] and first.loads == []
    assert (await load(pair, "Org/A", "n1"))[0] == 200
    assert len(first.loads) == 1  # a second replica
    assert (await load(pair, "Org/A"))[0] == 200
    assert len(first.loads) + len(second.loads) == 2  # it is warm already


async def test_load_by_an_admin_evicts_an_idle_model(pair: Cortex, first: FakeNode) -> None:
    await load(pair, "Org/A", "n1")
    assert (await load(pair, "Org/B", "n1"))[0] == 200
    assert first.unloads == ["Org/A"]


async def test_failed_load_by_an_admin_returns_the_reason_and_can_be_repeated_at_once(
    pair: Cortex, first: FakeNode
) -> None:
    first.load_error = (400, {"error": "the file is truncated"})
    status, body = await load(pair, "Org/A", "n1")
    assert status == 503 and "the file is truncated" in body["error"]["message"]
    async with pair.client.get(f"{pair.url}/api/nodes", headers=ADMIN) as response:
        [node, _] = (await response.json())["nodes"]
    assert [failure["model"] for failure in node["failures"]] == ["Org/A"]
    first.load_error = None
    assert (await load(pair, "Org/A", "n1"))[0] == 200


async def test_client_request_loads_on_another_node_if_the_load_by_an_admin_fails(
    pair: Cortex, first: FakeNode, second: FakeNode
) -> None:
    first.may_load.clear()
    first.load_error = (500, {"error": "out of memory"})
    loading = asyncio.create_task(load(pair, "Org/A", "n1"))
    await eventually(lambda: first.loads)
    asking = asyncio.create_task(pair.ask("Org/A"))
    await eventually(lambda: len(first.loads) == 2)  # joins the running load
    first.may_load.set()
    assert (await loading)[0] == 503
    assert (await asking)[0] == 200
    assert len(second.loads) == 1


async def test_load_by_an_admin_is_503_after_wait_secs_and_continues(pair: Cortex, first: FakeNode) -> None:
    first.may_load.clear()
    status, body = await load(pair, "Org/A", "n1", "?wait_secs=0")
    assert status == 503 and "still loading" in body["error"]["message"]
    first.may_load.set()

    async def is_warm() -> bool:
        return (await pair.get("/v1/models"))["data"][0]["state"] == "warm"

    await eventually(is_warm)


async def test_unload_by_an_admin_waits_for_running_requests(pair: Cortex, first: FakeNode) -> None:
    await load(pair, "Org/A", "n1")
    first.speak = never_end
    running = asyncio.create_task(pair.ask("Org/A", stream=True))
    await first.spoke.wait()
    unloading = asyncio.create_task(unload(pair, "Org/A", "n1"))
    await eventually(lambda: pair.gateway.fleet.view().draining)
    status, body = await unload(pair, "Org/A", "n1")
    assert (status, body["error"]["code"]) == (409, "model_busy")
    assert first.unloads == []
    first.go_on.set()
    await running
    assert await unloading == (200, {"model": "Org/A", "node": "n1", "nodes": ["n1"], "status": "unloaded"})
    assert first.unloads == ["Org/A"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("load", {"model": "no", "node": "n1"}, 404, "model_not_found"),
        ("load", {"model": "Org/A", "node": "no"}, 404, "node_not_found"),
        ("load", {"model": ""}, 400, "invalid_request_body"),
        ("load", {"model": "Org/A", "force": True}, 400, "invalid_request_body"),
        ("load?wait_secs=601", {"model": "Org/A"}, 400, "invalid_value"),
        ("unload", {"model": "Org/A", "node": "n1"}, 404, "model_not_found"),
        ("unload", {"model": "Org/A"}, 404, "model_not_found"),  # no node has loaded it
        ("unload", {"node": "n1"}, 400, "invalid_request_body"),
    ],
)
async def test_invalid_load_requests_are_rejected(pair: Cortex, path: str, body: Any, status: int, code: str) -> None:
    answered, response = await post(pair, f"/api/models/{path}", body)
    assert (answered, response["error"]["code"]) == (status, code)


async def clear(cortex: Cortex, path: str, key: str = "root") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with cortex.client.delete(f"{cortex.url}/api/models/{path}", headers=headers) as response:
        return response.status, await response.json()


async def test_prefix_cache_is_cleared_on_the_nodes_that_have_the_model(
    pair: Cortex, first: FakeNode, second: FakeNode
) -> None:
    assert (await clear(pair, "a/prefix-cache"))[1]["error"]["code"] == "model_not_found"
    await load(pair, "a", "n1")
    await load(pair, "a", "n2")
    cleared = {"model": "Org/A", "nodes": ["n2"], "status": "cleared", "deleted_bytes": 1000}
    assert await clear(pair, "Org%2FA/prefix-cache?node=n2") == (200, cleared)
    assert (first.cleared, second.cleared) == ([], ["Org/A"])
    assert (await clear(pair, "a/prefix-cache"))[1]["nodes"] == ["n1", "n2"]
    assert (await clear(pair, "a/prefix-cache", "a"))[0] == 403
    assert (await clear(pair, "a/prefix-cache?node=no"))[0] == 404


async def test_placement_ignores_saved_prompts_of_a_sleeping_model_after_they_are_cleared(
    pair: Cortex, first: FakeNode
) -> None:
    async def verdict() -> str:
        async with pair.client.get(f"{pair.url}/api/explain?model=Org/A&node=n1", headers=ADMIN) as response:
            return (await response.json())["candidates"][0]["verdict"]

    def reports_load() -> bool:
        health = pair.gateway.fleet.node("n1").health
        return health is not None and bool(health.models)

    await load(pair, "a", "n1")
    first.health = {"models": [{"id": "Org/A", "memory_prefixes": ["00ff"], "saved_prompts_mb": 9}]}
    await eventually(reports_load)
    assert "in memory" in await verdict()
    first.sleeps("Org/A")
    first.health = {}
    await eventually(lambda: not reports_load())
    assert "saved beginnings of prompts: 1" in await verdict()
    assert (await clear(pair, "a/prefix-cache?node=n1"))[0] == 200
    assert "saved beginnings" not in await verdict()


async def test_only_admins_can_load_and_unload_models(pair: Cortex, first: FakeNode) -> None:
    body = {"model": "Org/A", "node": "n1"}
    for path in ("/api/models/load", "/api/models/unload"):
        assert (await post(pair, path, body, "a"))[0] == 403
        async with pair.client.post(pair.url + path, json=body) as response:
            assert response.status == 401
    assert first.loads == []


async def test_load_on_a_third_party_backend_or_a_down_node_is_rejected(first: FakeNode) -> None:
    async with FakeNode(name="third").serving() as third, FakeNode(name="gone").serving() as gone:
        gone.down = True
        neurons = [{"name": node.name, "endpoint": node.url} for node in (third, gone)]
        neurons[0]["kind"] = "openai"
        settings = {"entitlements": {"keys": KEYS}, "neurons": neurons}
        async with running_cortex(third, gone, ready=False, settings=settings, models=MODELS) as cortex:
            await eventually(lambda: cortex.gateway.fleet.node("gone").problem)
            assert (await load(cortex, "Org/A", "third"))[1]["error"]["code"] == "third_party_backend"
            status, body = await load(cortex, "Org/A", "gone")
            assert (status, body["error"]["code"]) == (503, "node_down")
            assert "/models answered HTTP 500" in body["error"]["message"]


async def test_dry_run_of_a_load_can_select_or_exclude_a_node(pair: Cortex) -> None:
    await load(pair, "Org/A", "n1")

    async def explain(query: str) -> Any:
        async with pair.client.get(f"{pair.url}/api/explain?model=Org/A{query}", headers=ADMIN) as response:
            return await response.json()

    assert (await explain(""))["decision"] == "warm"
    only = await explain("&node=n2")
    assert (only["decision"], only["node"], len(only["candidates"])) == ("load", "n2", 1)
    without = await explain("&without=n1")
    assert (without["decision"], without["node"]) == ("load", "n2")
