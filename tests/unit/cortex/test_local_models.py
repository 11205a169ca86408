"""Models on the disks of nodes: they are listed as cold, load on demand, and administrators download them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex

ROOT = {"Authorization": "Bearer root"}
KEYS = [
    {"key": "root", "account_id": "root", "role": "admin"},
    {"key": "only-a", "account_id": "a", "models": ["Org/A"]},
]
SERVING: dict[str, Any] = {"gateway": {"local_models": True}, "entitlements": {"keys": KEYS}}
NOT_SERVING: dict[str, Any] = {"entitlements": {"keys": KEYS}}


@pytest.fixture
async def stored() -> AsyncIterator[FakeNode]:
    """A node with a memory of 10 GB that has A, B and a broken model on its disk."""
    node = FakeNode().with_memory_limit(10_000, {"Org/A": 4000, "Org/B": 7000})
    node.stores("Org/A", memory_mb=4000, names=["huggingface:Org/A", "Org/A:Q4_K_M"])
    node.stores("Org/B", memory_mb=7000).stores("Org/Broken", problem="not a GGUF file")
    async with node.serving() as running:
        yield running


async def post(cortex: Cortex, path: str, body: dict[str, Any], headers: dict[str, str] = ROOT) -> tuple[int, Any]:
    async with cortex.client.post(cortex.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def states(cortex: Cortex) -> dict[str, str]:
    return {entry["id"]: entry["state"] for entry in (await cortex.get("/v1/models"))["data"]}


async def test_model_on_a_nodes_disk_is_listed_as_cold_and_loads_on_demand(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=SERVING) as cortex:
        assert await states(cortex) == {"Org/A": "cold", "Org/B": "cold"}
        status, answer = await cortex.ask("Org/A")
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello")
        assert stored.loads == [
            {"model_id": "Org/A", "harness": "torch", "source": "huggingface:Org/A", "download": False}
        ]
        assert await states(cortex) == {"Org/A": "warm", "Org/B": "cold"}


async def test_model_on_a_nodes_disk_evicts_another_if_memory_is_short(stored: FakeNode) -> None:
    settings = SERVING | {"eviction": {"min_residency_secs": 0, "swap_wait_secs": 0}}
    async with running_cortex(stored, settings=settings) as cortex:
        assert (await cortex.ask("Org/A"))[0] == 200
        assert (await cortex.ask("Org/B"))[0] == 200
        assert stored.unloads == ["Org/A"]
        assert await states(cortex) == {"Org/A": "cold", "Org/B": "warm"}


@pytest.mark.parametrize("name", ["a", "org/a", "A:latest", "huggingface:Org/A", "Org/A:Q4_K_M"])
async def test_model_on_a_nodes_disk_is_found_under_each_accepted_spelling(stored: FakeNode, name: str) -> None:
    async with running_cortex(stored, settings=SERVING) as cortex:
        assert (await cortex.ask(name))[0] == 200
        assert [load["model_id"] for load in stored.loads] == ["Org/A"]


async def test_short_name_is_downloaded_under_the_name_of_its_repository(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=SERVING) as cortex:
        body = {"model": "llama3.2:1b", "node": "n1"}
        assert (await post(cortex, "/api/models/pull", body))[0] == 202
        assert [pull["model"] for pull in stored.pulls] == ["bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"]
        status, _ = await post(cortex, "/api/models/pull/cancel", body)
        assert status == 200


async def test_short_name_of_a_known_model_is_routed_to_the_loaded_model(node: FakeNode) -> None:
    name = "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"
    node.holds(name)
    async with running_cortex(node) as cortex:
        for short_name in ("llama3.2:1b", f"hf.co/{name}"):
            assert (await cortex.ask(short_name))[0] == 200
        status, answer = await cortex.ask("llama3.2:3b")
        assert (status, answer["error"]["message"]) == (404, "model 'llama3.2:3b' not found")
        assert [json.loads(body)["model"] for body in node.bodies] == [name, name]


async def test_ambiguous_short_model_name_is_an_unknown_model(stored: FakeNode) -> None:
    stored.stores("Other/A")
    async with running_cortex(stored, settings=SERVING) as cortex:
        status, answer = await cortex.ask("a")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_model_loaded_under_another_name_is_not_loaded_twice(stored: FakeNode) -> None:
    stored.holds("Org/A:Q4_K_M", granted_mb=4000)
    async with running_cortex(stored, settings=SERVING) as cortex:
        assert await states(cortex) == {"Org/A:Q4_K_M": "warm", "Org/B": "cold"}
        assert (await cortex.ask("Org/A"))[0] == 200
        assert stored.loads == []


async def test_model_list_of_a_key_also_applies_to_models_on_nodes_disks(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=SERVING) as cortex:
        cortex.client.headers["authorization"] = "Bearer only-a"
        assert await states(cortex) == {"Org/A": "cold"}
        status, answer = await cortex.ask("b")
        assert (status, answer["error"]["code"]) == (403, "model_not_allowed")
        assert (await cortex.ask("a"))[0] == 200
        assert [load["model_id"] for load in stored.loads] == ["Org/A"]


async def test_gateway_configured_not_to_serve_local_models_serves_only_the_catalog(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=NOT_SERVING, models=[{"id": "Org/B"}]) as cortex:
        assert await states(cortex) == {"Org/B": "cold"}
        assert (await cortex.ask("Org/A"))[0] == 404
        assert stored.loads == []


async def test_admin_can_load_a_model_on_a_nodes_disk_even_if_local_models_are_not_served(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=NOT_SERVING, models=[{"id": "Org/B"}]) as cortex:
        status, answer = await post(cortex, "/api/models/load", {"model": "a"})
        assert (status, answer) == (200, {"model": "Org/A", "node": "n1", "status": "loaded"})
        assert (await cortex.ask("Org/A"))[0] == 200
        status, answer = await post(cortex, "/api/models/unload", {"model": "Org/A"})
        assert (status, answer["nodes"]) == (200, ["n1"])
        assert stored.unloads == ["Org/A"]


async def test_model_just_stored_on_a_node_is_found_before_a_404(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=SERVING, poll_interval_secs=3600) as cortex:
        stored.local.append({"id": "Org/New", "source": "huggingface:Org/New"})
        assert (await cortex.ask("Org/New"))[0] == 200


async def test_local_models_of_each_node_are_listed_with_size_memory_and_problem(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=NOT_SERVING) as cortex:
        listing = await cortex.get("/api/models/local")
        (node,) = listing["nodes"]
        assert (listing["serves_local"], node["name"], node["downloads"], node["free_mb"]) == (False, "n1", True, 10000)
        models = {model["id"]: model for model in node["models"]}
        assert (models["Org/A"]["memory_mb"], models["Org/A"]["status"]) == (4000, "cold")
        assert models["Org/Broken"]["problem"] == "not a GGUF file"


async def test_download_streams_its_progress_and_the_model_is_served(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=SERVING, poll_interval_secs=3600) as cortex:
        body = {"model": "Org/New", "stream": True}
        async with cortex.client.post(f"{cortex.url}/api/models/pull", json=body, headers=ROOT) as response:
            events = response.content
            assert await events.readline() == b"event: progress\n"
            state = json.loads((await events.readline()).removeprefix(b"data: "))
            assert (state["node"], state["model"], state["status"]) == ("n1", "Org/New", "running")
            stored.stores("Org/New").pulls[-1] |= {"status": "done", "done": 5}
            last = [line async for line in events if line.startswith((b"event", b"data"))][-2:]
        assert last[0] == b"event: done\n"
        assert (await states(cortex))["Org/New"] == "cold"


async def test_download_is_canceled_by_the_name_of_its_model(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=NOT_SERVING) as cortex:
        assert (await post(cortex, "/api/models/pull", {"model": "Org/New", "node": "n1"}))[0] == 202
        status, answer = await post(cortex, "/api/models/pull/cancel", {"model": "Org/New", "node": "n1"})
        assert (status, answer["status"]) == (200, "canceled")
        assert (await cortex.get("/api/models/pulls"))["pulls"] == [{"node": "n1", **answer}]
        status, answer = await post(cortex, "/api/models/pull/cancel", {"model": "Org/New", "node": "n1"})
        assert (status, answer["error"]["code"]) == (404, "pull_not_found")


async def test_downloads_need_an_admin_key(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=NOT_SERVING) as cortex:
        for headers in ({}, {"Authorization": "Bearer only-a"}):
            status, _ = await post(cortex, "/api/models/pull", {"model": "Org/New"}, headers)
            assert status in (401, 403)
        assert stored.pulls == []


async def test_model_deleted_from_a_disk_disappears_from_the_model_list(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=SERVING) as cortex:
        del stored.local[0]
        stored.health["local_revision"] = "changed"
        await eventually(lambda: "Org/A" not in cortex.gateway.fleet.view().local.models)
        assert (await cortex.ask("Org/A"))[0] == 404


async def test_explanation_for_a_load_includes_models_that_only_admins_can_load(stored: FakeNode) -> None:
    async with running_cortex(stored, settings=NOT_SERVING) as cortex:
        request = await cortex.get("/api/explain?model=Org/A")
        load = await cortex.get("/api/explain?model=Org/A&for_load=true")
        assert (request["decision"], load["decision"]) == ("refuse", "load")
        assert (await post(cortex, "/api/models/load", {"model": "Org/A"}))[0] == 200


async def test_node_is_asked_once_for_the_size_of_a_catalog_model_before_a_load(stored: FakeNode) -> None:
    stored.sizes_mb["Org/Huge"] = 64_000
    models = [{"id": "Org/Huge"}, {"id": "Org/Sized", "vram_mb": 1}]
    async with running_cortex(stored, settings=NOT_SERVING, models=models) as cortex:
        explanation = await cortex.get("/api/explain?model=Org/Huge")
        assert (explanation["decision"], explanation["candidates"][0]["verdict"]) == (
            "refuse",
            "needs 62.5 GB, 9.77 GB free: too little, although the node is empty",
        )
        statuses = [(await cortex.ask("Org/Huge"))[0] for _ in range(2)]
        assert statuses == [503, 503]
        assert (await cortex.ask("Org/Sized"))[0] == 200
        assert (stored.estimated, [load["model_id"] for load in stored.loads]) == (["Org/Huge"], ["Org/Sized"])


async def test_node_is_asked_for_the_memory_of_a_newly_stored_model_before_its_load(stored: FakeNode) -> None:
    stored.stores("Org/New")
    stored.sizes_mb["Org/New"] = 8000
    settings = SERVING | {"eviction": {"min_residency_secs": 0, "swap_wait_secs": 0}}
    async with running_cortex(stored, settings=settings) as cortex:
        assert (await cortex.ask("Org/A"))[0] == 200
        explanation = await cortex.get("/api/explain?model=new")
        assert explanation["candidates"][0]["verdict"].startswith("needs 7.81 GB, 5.86 GB free, could evict Org/A")
        assert (await cortex.ask("Org/New"))[0] == 200
        assert [load["model_id"] for load in stored.loads] == ["Org/A", "Org/New"]  # no rejected attempt
