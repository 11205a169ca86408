"""Cold loads through the gateway: one load per model, however many requests wait."""

import asyncio
from typing import Any

import pytest

from cortex.fake_node import FakeNode, never_end
from cortex.running_gateway import eventually, running_cortex
from helexa.cortex.fleet import poller

MODELS = [{"id": "Org/Cold", "source": "pypi:cold-model"}, {"id": "Org/Other"}]


@pytest.fixture
async def cold(node: FakeNode) -> Any:
    async with running_cortex(node, models=MODELS, aliases={"cold": "Org/Cold"}) as cortex:
        yield cortex


async def test_concurrent_requests_for_a_cold_model_cause_one_load(cold: Any, node: FakeNode) -> None:
    node.may_load.clear()
    ask_tasks = [asyncio.create_task(cold.ask(model)) for model in ["Org/Cold", "cold"] * 5]
    await eventually(lambda: node.loads)
    other_ask = asyncio.create_task(cold.ask("Org/Other"))  # a load of another model runs in parallel
    await eventually(lambda: len(node.loads) == 2)
    node.may_load.set()
    assert [status for status, _ in await asyncio.gather(*ask_tasks, other_ask)] == [200] * 11
    assert node.loads == [
        {"model_id": "Org/Cold", "harness": "torch", "source": "pypi:cold-model"},
        {"model_id": "Org/Other", "harness": "torch"},
    ]
    assert await cold.sample("cortex_cold_starts_total", model="Org/Cold", node="n1") == 1


async def test_concurrent_requests_for_a_cold_model_load_the_model_on_one_node() -> None:
    async with (
        FakeNode("a").serving() as a,
        FakeNode("b").serving() as b,
        running_cortex(a, b, models=MODELS) as cortex,
    ):
        a.may_load.clear()
        ask_tasks = [asyncio.create_task(cortex.ask("Org/Cold")) for _ in range(10)]
        await eventually(lambda: a.loads)
        a.may_load.set()
        assert [status for status, _ in await asyncio.gather(*ask_tasks)] == [200] * 10
        assert (len(a.loads), len(b.loads)) == (1, 0)


async def test_loaded_model_is_served_before_the_next_poll(
    cold: Any, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "REFRESH_TIMEOUT_SECS", 0.1)
    node.may_answer_polls.clear()
    assert (await cold.ask("cold"))[0] == 200
    assert (await cold.ask("cold"))[0] == 200
    assert len(node.loads) == 1
    node.may_answer_polls.set()


async def test_load_error_already_loaded_of_a_node_counts_as_success(cold: Any, node: FakeNode) -> None:
    node.load_error = (400, {"error": "model 'Org/Cold' is already loaded"})
    assert (await cold.ask("cold"))[0] == 200


@pytest.mark.parametrize(
    ("status", "body", "reason", "retry_after"),
    [
        (400, {"error": "out of memory:\n  3 GB short"}, "out of memory: 3 GB short", None),
        (422, {"error": {"kind": "repo_fetch_failed", "message": "hub is down"}}, "hub is down", "5"),
        (422, {"error": {"kind": "quant_not_found", "available": ["q8_0"]}}, "quant_not_found", None),
        (500, "boom", "the node answered HTTP 500; see the node's log", "5"),
    ],
)
async def test_failed_load_reports_the_reason_to_the_client(
    cold: Any, node: FakeNode, status: int, body: Any, reason: str, retry_after: str | None
) -> None:
    node.load_error = (status, body)
    async with cold.client.post(f"{cold.url}/v1/chat/completions", json={"model": "cold"}) as response:
        assert response.status == 503
        assert response.headers.get("retry-after") == retry_after
        error = (await response.json())["error"]
    assert error["message"] == f"model 'Org/Cold' could not be loaded on node 'n1': {reason}"
    assert (error["type"], error["code"]) == ("api_error", "service_unavailable")
    assert await cold.sample("cortex_request_errors_total", model="Org/Cold", node="none") == 1


async def test_load_continues_after_the_requesting_client_disconnects(cold: Any, node: FakeNode) -> None:
    node.may_load.clear()
    ask_tasks = asyncio.create_task(cold.ask("Org/Cold"))
    await eventually(lambda: node.loads)
    ask_tasks.cancel()

    async def counted() -> bool:
        return await cold.sample("cortex_requests_total", model="Org/Cold", node="none") == 1

    await eventually(counted)
    node.may_load.set()
    assert (await cold.ask("Org/Cold"))[0] == 200
    assert len(node.loads) == 1


async def test_model_is_listed_as_loading_during_its_load(cold: Any, node: FakeNode) -> None:
    node.may_load.clear()
    ask_tasks = asyncio.create_task(cold.ask("Org/Cold"))
    await eventually(lambda: node.loads)
    entry = await cold.get("/v1/models/cold")
    assert entry["locations"] == [{"node": "n1", "status": "loading", "vram_estimate_mb": None}]
    node.may_load.set()
    assert (await ask_tasks)[0] == 200


FULL: dict[str, Any] = {"models": [{"id": model, "vram_mb": 6000} for model in ("A", "B")]}
SWIFT = {"eviction": {"min_residency_secs": 0, "swap_wait_secs": 0}}


async def test_running_stream_ends_before_its_model_is_evicted() -> None:
    node = FakeNode().holds("A").with_accelerator(8000, {"A": 6000, "B": 6000})
    async with node.serving(), running_cortex(node, settings=SWIFT, **FULL) as cortex:
        node.speak = never_end
        first = asyncio.create_task(cortex.ask("A", stream=True))
        await eventually(lambda: node.speaking)
        node.speak = None
        second = asyncio.create_task(cortex.ask("B"))
        await eventually(lambda: cortex.gateway.fleet.view().draining)
        third = asyncio.create_task(cortex.ask("A"))  # arrives during the drain: waits for a reload
        assert (node.unloads, node.loads) == ([], [])
        node.go_on.set()
        assert (await first)[0] == (await second)[0] == (await third)[0] == 200
        assert node.unloads == ["A", "B"]
        assert await cortex.sample("cortex_evictions_total", model="A", node="n1") == 1
        assert not cortex.gateway.fleet.view().in_flight


async def test_explain_endpoint_does_not_load_or_unload_models() -> None:
    node = FakeNode().holds("A").with_accelerator(8000, {"A": 6000, "B": 6000})
    async with node.serving(), running_cortex(node, settings=SWIFT, aliases={"b": "B"}, **FULL) as cortex:
        explanation = await cortex.get("/api/explain?model=b")
        assert (explanation["model"], explanation["decision"], explanation["node"], explanation["evict"]) == (
            "B",
            "load",
            "n1",
            ["A"],
        )
        assert explanation["candidates"][0]["verdict"] == "needs 5.86 GB, 1.95 GB free, could evict A (never used)"
        assert (await cortex.get("/api/explain"))["error"]["code"] == "missing_model_field"
        assert (node.unloads, node.loads) == ([], [])
