"""Loads, evictions and waiting requests, over real sockets with fake nodes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cortex.fake_node import FakeNode
from cortex.lifecycle.running_lifecycle import MODELS, SIZES, stage
from cortex.running_gateway import eventually
from helexa.core.errors import ApiError


@asynccontextmanager
async def one_card(*resident: str, total_mb: int = 8000) -> AsyncIterator[FakeNode]:
    async with FakeNode("n1").holds(*resident).with_accelerator(total_mb, SIZES).serving() as node:
        yield node


async def polled_again(node: FakeNode) -> None:
    """Wait for five more polls; each of them makes the gateway decide anew about loads and evictions."""
    polls = node.polled_paths.count("/models")
    await eventually(lambda: node.polled_paths.count("/models") >= polls + 5)


async def test_concurrent_requests_load_a_model_once_and_different_models_load_in_parallel() -> None:
    async with one_card(total_mb=16000) as node, stage(node) as s:
        node.may_load.clear()
        ask_tasks = [s.ask("A") for _ in range(10)] + [s.ask("C")]
        await eventually(lambda: len(node.loads) == 2)
        node.may_load.set()
        assert [warm.model for warm in await asyncio.gather(*ask_tasks)] == ["A"] * 10 + ["C"]
        assert sorted(load["model_id"] for load in node.loads) == ["A", "C"]
        assert sorted(s.loaded) == [("A", "n1"), ("C", "n1")]


async def test_two_models_of_equal_residency_priority_are_evicted_for_each_other_in_turn() -> None:
    async with one_card("A") as node, stage(node) as s:
        assert (await s.ask("B")).node == "n1"
        assert s.holds("n1") == {"B"}
        assert (await s.ask("A")).node == "n1"
        assert node.unloads == ["A", "B"]
        assert s.evicted == [("A", "n1"), ("B", "n1")]


async def test_only_as_many_models_as_needed_are_evicted() -> None:
    async with one_card("A", "C", total_mb=10000) as node, stage(node) as s:
        await s.ask("B")
        assert node.unloads == ["A"]


async def test_unreported_model_size_is_taken_from_the_catalog() -> None:
    async with one_card("A") as node, stage(node) as s:
        assert s.fleet.node("n1").models["A"].vram_used_mb is None
        await s.ask("B")
        assert node.unloads == ["A"]


async def test_model_of_higher_residency_priority_is_not_evicted() -> None:
    models = [*MODELS[:3], {"id": "Pinned", "vram_mb": 6000, "pinned_on": ["n1"]}]
    async with one_card("Pinned") as node, stage(node, models=models) as s:
        error = await s.refused("B")
        assert (error.status, error.code, error.retry_after) == (503, "service_unavailable", 30)
        assert "the model needs 6.84 GB" in str(error)
        assert node.unloads == []
        assert s.settled()


async def test_busy_model_is_drained_before_its_eviction() -> None:
    async with one_card("A") as node, stage(node) as s:
        with s.fleet.request("n1", "A"):
            ask_b = s.ask("B")
            await eventually(lambda: ("n1", "A") in s.fleet.view().draining)
            ask_a = s.ask("A")  # arrives during the drain: waits for a reload
            await polled_again(node)
            assert node.unloads == []
        await ask_b
        await ask_a
        assert node.unloads == ["A", "B"]


async def test_busy_model_is_not_drained_before_swap_wait_has_passed() -> None:
    async with one_card("A") as node, stage(node, swap_wait_secs=60) as s:
        with s.fleet.request("n1", "A"):
            ask_b = s.ask("B")
            await eventually(lambda: s.lifecycle.progress("B"))
            await polled_again(node)
            progress = s.lifecycle.progress("B")
            assert progress is not None and progress.stage == "waiting for memory on n1"
            assert ("n1", "A") not in s.fleet.view().draining
        ask_b.cancel()
        await eventually(lambda: s.lifecycle.progress("B") is None)
        assert node.unloads == []


async def test_model_with_requests_of_another_gateway_is_not_evicted() -> None:
    async with one_card("A") as node, stage(node, poll_secs=60) as s:
        node.health["models"] = [{"id": "A", "in_flight": 1}]
        ask_b = s.ask("B")
        polls = len(node.polled_paths)
        await eventually(lambda: len(node.polled_paths) > polls + 3)
        assert node.unloads == []
        node.health["models"] = []
        await ask_b
        assert node.unloads == ["A"]


async def test_drain_for_an_eviction_ends_if_the_waiting_request_is_canceled() -> None:
    async with one_card("A") as node, stage(node) as s:
        with s.fleet.request("n1", "A"):
            ask_b = s.ask("B")
            await eventually(lambda: ("n1", "A") in s.fleet.view().draining)
            ask_b.cancel()
            await eventually(s.settled)
        assert node.unloads == [] and node.loads == []
        assert not s.lifecycle.snapshot().expected_free  # no memory is reserved for the cancelled request
        assert (await s.ask("A")).node == "n1"


async def test_load_continues_after_all_waiting_requests_are_canceled() -> None:
    async with one_card() as node, stage(node) as s:
        node.may_load.clear()
        ask_tasks = [s.ask("A") for _ in range(3)]
        await eventually(lambda: node.loads)
        for task in ask_tasks:
            task.cancel()
        await asyncio.wait(ask_tasks)
        assert ("n1", "A") in s.fleet.view().loading
        node.may_load.set()
        await eventually(lambda: "A" in s.holds("n1"))
        await eventually(s.settled)
        assert (await s.ask("A")).node == "n1"
        assert len(node.loads) == 1


async def test_failed_load_is_retried_on_another_node_with_back_off() -> None:
    async with (
        FakeNode("a").with_accelerator(9000, SIZES).serving() as a,
        FakeNode("b").with_accelerator(8000, SIZES).serving() as b,
        stage(a, b) as s,
    ):
        a.load_error = (500, {"error": "out of memory"})
        assert (await s.ask("A")).node == "b"
        b.load_error = (400, {"error": "no such file"})
        assert "on node 'a': out of memory" in str(await s.refused("B"))
        assert [len(node.loads) for node in (a, b)] == [2, 2]
        error = await s.refused("B")  # within the back-off: no node gets another load
        assert [len(node.loads) for node in (a, b)] == [2, 2]
        assert error.retry_after in range(1, 6)


@pytest.mark.parametrize("stated", [True, False])
async def test_idle_model_is_evicted_if_a_new_model_would_exceed_the_memory_limit_of_a_node(stated: bool) -> None:
    sizes = {"A": 700, "B": 600}
    models = [{"id": model} | ({"vram_mb": size} if stated else {}) for model, size in sizes.items()]
    async with FakeNode().with_memory_limit(1000, sizes).serving() as node, stage(node, models=models) as s:
        for model in ("B", "A", "B"):
            assert (await s.ask(model)).node == "n1"
            assert s.holds("n1") == {model}
            await eventually(lambda model=model: s.fleet.node("n1").models[model].granted_mb == sizes[model])


async def test_load_rejected_by_the_node_for_lack_of_memory_is_retried_after_an_eviction() -> None:
    models = [{"id": "A"}, {"id": "B"}]
    async with (
        FakeNode().with_memory_limit(1000, {"A": 700, "B": 600}).serving() as node,
        stage(node, models=models) as s,
    ):
        await s.ask("B")
        await eventually(lambda: s.fleet.node("n1").models["B"].granted_mb == 600)
        node.may_load.clear()
        request = s.ask("A")
        await eventually(lambda: "A" in s.holds("n1") and s.fleet.node("n1").models["A"].status == "loading")
        node.may_load.set()
        assert (await request).node == "n1"
        assert (node.unloads, len(node.loads)) == (["B"], 3)


async def test_model_larger_than_the_memory_limit_of_the_node_is_rejected_without_retry_after() -> None:
    models = [{"id": "A"}, {"id": "B"}]
    async with (
        FakeNode().with_memory_limit(1000, {"A": 1001, "B": 600}).serving() as node,
        stage(node, models=models) as s,
    ):
        await s.ask("B")
        assert (await s.refused("A")).retry_after is None
        assert node.unloads == []


async def test_request_whose_model_needs_the_memory_of_a_pinned_model_gets_a_retry_after() -> None:
    models = [{"id": "A"}, {"id": "B", "residency_priority": 1000}]
    async with (
        FakeNode().with_memory_limit(1000, {"A": 700, "B": 600}).serving() as node,
        stage(node, models=models) as s,
    ):
        await s.ask("B")
        assert (await s.refused("A")).retry_after
        assert node.unloads == []


async def test_permanent_load_failure_has_no_retry_after() -> None:
    async with one_card() as node, stage(node) as s:
        node.load_error = (422, {"error": {"kind": "quant_not_found", "available": ["q8_0"]}})
        error = await s.refused("A")
        assert (error.status, error.retry_after) == (503, None)
        assert str(error) == "model 'A' could not be loaded on node 'n1': quant_not_found"


async def test_waiting_requests_fail_if_the_node_that_loads_goes_down() -> None:
    async with one_card() as node, stage(node) as s:
        node.may_load.clear()
        ask_tasks = [s.ask("A") for _ in range(3)]
        await eventually(lambda: node.loads)
        node.down = True
        outcomes = await asyncio.gather(*ask_tasks, return_exceptions=True)
        assert all(isinstance(error, ApiError) and error.retry_after for error in outcomes)
        await eventually(s.settled)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("load ")]
        node.may_load.set()


async def test_load_that_makes_no_progress_times_out() -> None:
    async with one_card() as node, stage(node, gateway={"load_timeout_secs": 1}) as s:
        node.may_load.clear()
        error = await s.refused("A")
        assert "no progress within 1 s" in str(error)
        moving = s.ask("C")
        loading = {"id": "C", "status": "loading", "progress": 0.0, "stage": "weights"}
        node.models.append(loading)
        for step in range(30):
            loading["progress"] = step / 30
            await asyncio.sleep(0.05)
        progress = s.lifecycle.progress("C")
        assert progress is not None and progress.fraction and progress.eta_secs and progress.stage == "weights"
        node.models.remove(loading)
        node.may_load.set()
        assert (await moving).node == "n1"


async def test_wait_for_a_model_that_takes_too_long_ends_with_retry_after() -> None:
    async with one_card() as node, stage(node, gateway={"load_wait_secs": 0.2}) as s:
        node.may_load.clear()
        error = await s.refused("A")
        assert (error.status, error.retry_after) == (503, 10)
        assert str(error) == "model 'A' is still loading; retry in 10 s"
        node.may_load.set()
        await eventually(lambda: "A" in s.holds("n1"))


async def test_request_whose_expected_wait_exceeds_the_limit_is_rejected_at_once() -> None:
    async with one_card() as node, stage(node, gateway={"load_wait_secs": 2}) as s:
        node.may_load.clear()
        ask_b = s.ask("A")
        node.models.append({"id": "A", "status": "loading", "progress": 0.03, "stage": "weights"})

        def slow() -> bool:
            progress = s.lifecycle.progress("A")
            return progress is not None and (progress.eta_secs or 0) > 5

        await eventually(slow)
        error = await s.refused("A")
        assert not ask_b.done()
        assert error.status == 503 and error.retry_after and error.retry_after > 5
        node.models.clear()
        node.may_load.set()
        await ask_b


async def test_many_evictions_on_a_node_log_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with one_card("A") as node, stage(node, defrag_after_cycles=2) as s:
        await s.ask("B")
        assert "has unloaded many models" not in caplog.text
        await s.ask("A")
        assert "node=n1 unloads=2" in caplog.text


async def test_idle_models_are_unloaded_unless_pinned() -> None:
    models = [*MODELS[:3], {"id": "Pinned", "vram_mb": 6000, "pinned_on": ["n1"]}]
    async with one_card("A", "Pinned", total_mb=20000) as node, stage(node, models=models, idle_ttl_secs=0.3) as s:
        await s.ask("C")
        await eventually(lambda: s.holds("n1") == {"Pinned"})
        assert sorted(node.unloads) == ["A", "C"]
        assert sorted(s.evicted) == [("A", "n1"), ("C", "n1")]


async def test_unload_that_the_node_rejects_is_not_repeated_immediately() -> None:
    async with one_card("A") as node, stage(node, idle_ttl_secs=0.1) as s:
        node.unload_error = (500, {"error": "busy"})
        await eventually(lambda: node.unloads)
        await polled_again(node)
        assert node.unloads == ["A"] and s.evicted == []
        assert not s.fleet.view().draining


async def test_eviction_that_the_node_rejects_fails_the_waiting_request() -> None:
    async with one_card("A") as node, stage(node) as s:
        node.unload_error = (500, {"error": "busy"})
        assert str(await s.refused("B")) == "model 'B' could not be loaded on node 'n1': busy"
        assert s.holds("n1") == {"A"} and not s.lifecycle.snapshot().expected_free


async def test_request_that_waits_for_memory_is_served_by_another_node_that_has_loaded_its_model() -> None:
    async with (
        one_card("A") as node,
        FakeNode("n2").serving() as other_node,
        stage(node, other_node, swap_wait_secs=60) as s,
    ):
        with s.fleet.request("n1", "A"):
            ask_b = s.ask("B")
            await eventually(lambda: s.lifecycle.progress("B"))
            other_node.holds("B")
            assert (await ask_b).node == "n2"
        assert node.unloads == [] and other_node.loads == []


async def test_model_of_a_node_that_came_back_serves_waiting_requests_before_its_eviction() -> None:
    a = FakeNode("a").with_accelerator(7500, SIZES).holds("C")
    b = FakeNode("b").with_accelerator(7500, SIZES).holds("B")
    async with a.serving(), b.serving(), stage(a, b, swap_wait_secs=60) as s:
        with s.fleet.request("a", "C"):
            b.down = True
            await eventually(lambda: not s.fleet.node("b").healthy)
            first, second = s.ask("B"), s.ask("A")
            await eventually(lambda: s.lifecycle.progress("B") is not None and s.lifecycle.progress("A") is not None)
            b.down = False
            assert (await first).node == "b"
            assert ("b", "B") not in s.fleet.view().draining
            assert (await second).node == "b"


async def test_memory_of_a_running_load_is_not_given_to_a_second_load() -> None:
    async with one_card(total_mb=10000) as node, stage(node, swap_wait_secs=60) as s:
        node.may_load.clear()
        first = s.ask("A")
        await eventually(lambda: node.loads)
        second = s.ask("B")  # the node still reports the memory as free
        await eventually(lambda: s.lifecycle.progress("B"))
        assert len(node.loads) == 1
        node.may_load.set()
        await first
        second.cancel()


async def test_request_is_rejected_if_too_many_requests_wait_for_a_load() -> None:
    async with one_card() as node, stage(node) as s:
        node.may_load.clear()
        ask_tasks = [s.ask("A") for _ in range(256)]
        await eventually(lambda: node.loads)
        assert (await s.refused("A")).code == "rate_limit_exceeded"
        node.may_load.set()
        assert len({warm.node for warm in await asyncio.gather(*ask_tasks)}) == 1
