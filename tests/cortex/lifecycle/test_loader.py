"""Cold loads: one per model and node, whoever waits."""

import asyncio
from typing import Any

import pytest

from cortex.fake_node import FakeNode, never_end
from cortex.running import eventually, running_cortex

MODELS = [{"id": "Org/Cold", "source": "pypi:cold-model"}, {"id": "Org/Other"}]


@pytest.fixture
async def cold(node: FakeNode) -> Any:
    async with running_cortex(node, models=MODELS, aliases={"cold": "Org/Cold"}) as cortex:
        yield cortex


async def test_ten_requests_for_a_cold_model_load_it_once(cold: Any, node: FakeNode) -> None:
    node.may_load.clear()
    asking = [asyncio.create_task(cold.ask(model)) for model in ["Org/Cold", "cold"] * 5]
    await eventually(lambda: node.loads)
    other = asyncio.create_task(cold.ask("Org/Other"))  # another model does not wait for it
    await eventually(lambda: len(node.loads) == 2)
    node.may_load.set()
    assert [status for status, _ in await asyncio.gather(*asking, other)] == [200] * 11
    assert node.loads == [
        {"model_id": "Org/Cold", "harness": "torch", "source": "pypi:cold-model"},
        {"model_id": "Org/Other", "harness": "torch"},
    ]
    assert await cold.sample("cortex_cold_starts_total", model="Org/Cold", node="n1") == 1


async def test_ten_requests_for_a_cold_model_that_two_nodes_could_hold_load_it_on_one() -> None:
    async with (
        FakeNode("a").serving() as a,
        FakeNode("b").serving() as b,
        running_cortex(a, b, models=MODELS) as cortex,
    ):
        a.may_load.clear()
        asking = [asyncio.create_task(cortex.ask("Org/Cold")) for _ in range(10)]
        await eventually(lambda: a.loads)
        a.may_load.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 10
        assert (len(a.loads), len(b.loads)) == (1, 0)


async def test_a_loaded_model_needs_no_poll_to_serve(cold: Any, node: FakeNode) -> None:
    node.may_answer_polls.clear()
    assert (await cold.ask("cold"))[0] == 200
    assert (await cold.ask("cold"))[0] == 200
    assert len(node.loads) == 1
    node.may_answer_polls.set()


async def test_already_loaded_is_a_success(cold: Any, node: FakeNode) -> None:
    node.load_refusal = (400, {"error": "model 'Org/Cold' is already loaded"})
    assert (await cold.ask("cold"))[0] == 200


@pytest.mark.parametrize(
    ("status", "body", "reason", "retry_after"),
    [
        (400, {"error": "out of memory:\n  3 GB short"}, "out of memory: 3 GB short", None),
        (422, {"error": {"kind": "repo_fetch_failed", "message": "hub is down"}}, "hub is down", "5"),
        (422, {"error": {"kind": "quant_not_found", "available": ["q8_0"]}}, "quant_not_found", None),
        (500, "boom", "the node answered HTTP 500", "5"),
    ],
)
async def test_a_load_that_fails_says_why(
    cold: Any, node: FakeNode, status: int, body: Any, reason: str, retry_after: str | None
) -> None:
    node.load_refusal = (status, body)
    async with cold.client.post(f"{cold.url}/v1/chat/completions", json={"model": "cold"}) as response:
        assert response.status == 503
        assert response.headers.get("retry-after") == retry_after
        error = (await response.json())["error"]
    assert error["message"] == f"model 'Org/Cold' could not be loaded on node 'n1': {reason}"
    assert (error["type"], error["code"]) == ("api_error", "service_unavailable")
    assert await cold.sample("cortex_request_errors_total", model="Org/Cold", node="none") == 1


async def test_a_load_goes_on_when_the_one_who_asked_hangs_up(cold: Any, node: FakeNode) -> None:
    node.may_load.clear()
    asking = asyncio.create_task(cold.ask("Org/Cold"))
    await eventually(lambda: node.loads)
    asking.cancel()

    async def counted() -> bool:
        return await cold.sample("cortex_requests_total", model="Org/Cold", node="none") == 1

    await eventually(counted)
    node.may_load.set()
    assert (await cold.ask("Org/Cold"))[0] == 200
    assert len(node.loads) == 1


async def test_a_model_is_listed_as_loading_while_it_loads(cold: Any, node: FakeNode) -> None:
    node.may_load.clear()
    asking = asyncio.create_task(cold.ask("Org/Cold"))
    await eventually(lambda: node.loads)
    entry = await cold.get("/v1/models/cold")
    assert entry["locations"] == [{"node": "n1", "status": "loading", "vram_estimate_mb": None}]
    node.may_load.set()
    assert (await asking)[0] == 200


FULL: dict[str, Any] = {"models": [{"id": model, "vram_mb": 6000} for model in ("A", "B")]}
SWIFT = {"eviction": {"min_residency_secs": 0, "swap_wait_secs": 0}}


async def test_a_stream_ends_in_peace_before_its_model_makes_room_for_another() -> None:
    node = FakeNode().holds("A").with_accelerator(8000, {"A": 6000, "B": 6000})
    async with node.serving(), running_cortex(node, settings=SWIFT, **FULL) as cortex:
        node.speak = never_end
        first = asyncio.create_task(cortex.ask("A", stream=True))
        await eventually(lambda: node.speaking)
        node.speak = None
        second = asyncio.create_task(cortex.ask("B"))
        await eventually(lambda: cortex.gateway.fleet.view().draining)
        third = asyncio.create_task(cortex.ask("A"))  # too late for this turn
        assert (node.unloads, node.loads) == ([], [])
        node.go_on.set()
        assert (await first)[0] == (await second)[0] == (await third)[0] == 200
        assert node.unloads == ["A", "B"]
        assert await cortex.sample("cortex_evictions_total", model="A", node="n1") == 1
        assert not cortex.gateway.fleet.view().in_flight


async def test_what_would_happen_is_explained_without_doing_it() -> None:
    node = FakeNode().holds("A").with_accelerator(8000, {"A": 6000, "B": 6000})
    async with node.serving(), running_cortex(node, settings=SWIFT, aliases={"b": "B"}, **FULL) as cortex:
        told = await cortex.get("/api/explain?model=b")
        assert (told["model"], told["decision"], told["node"], told["evict"]) == ("B", "load", "n1", ["A"])
        assert told["candidates"][0]["verdict"] == "needs 6000 MB, 2000 free, could evict A (never used)"
        assert (await cortex.get("/api/explain"))["error"]["code"] == "missing_model_field"
        assert (node.unloads, node.loads) == ([], [])
