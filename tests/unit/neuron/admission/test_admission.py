"""Admission control with asyncio tasks: waiting, cancellation, rejections, and generation requests."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec
import pytest

from helexa.core.errors import ApiError, shutting_down
from helexa.core.wire.request import GenerationRequest
from helexa.neuron.admission import Admission
from helexa.neuron.config import AdmissionConfig
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import Finished, Started
from helexa.neuron.requests.inference import run
from neuron.fake_models import until
from neuron.scripted_engine import Script, answer, endless, scripted_model

REQUEST = GenerationRequest(model="m")


def model_with(script: Script, pages: int = 100, **limits: Any) -> ServedModel:
    model = scripted_model(script)
    model.engine.ready = msgspec.structs.replace(model.engine.ready, kv_pages=pages, kv_bytes=pages << 20)
    model.engine.free_pages = pages
    model.admission = Admission(AdmissionConfig(**limits), model.engine)
    return model


class Clients:
    """Admitted requests, one task each, that hold their slots until `end` cancels them."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.admitted: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def arrive(self, name: str, prompt: int = 10) -> asyncio.Task[None]:
        task = self._tasks[name] = asyncio.create_task(self._hold_slot(name, prompt))
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    async def end(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)

    async def _hold_slot(self, name: str, prompt: int) -> None:
        async with self.admission.admit(name[0], prompt, 10):
            self.admitted.append(name)
            await asyncio.Event().wait()


async def test_waiting_requests_are_admitted_and_counters_return_to_0() -> None:
    model = model_with(endless(""), max_in_flight=2)
    clients = Clients(model.admission)
    for name in ("a1", "a2", "a3", "a4", "b1"):
        await clients.arrive(name)
    assert clients.admitted == ["a1", "a2"]
    load = model.load()
    assert (load.in_flight, load.queue_depth, load.max_in_flight, load.max_queue_depth) == (2, 3, 2, 256)
    await clients.end("a3")  # the client disconnects while its request waits
    await clients.end("a1")
    await clients.end("a2")
    assert sorted(clients.admitted[2:]) == ["a4", "b1"]
    for name in ("a4", "b1"):
        await clients.end(name)
    load = model.load()
    assert (load.in_flight, load.queue_depth, load.kv_available_mb) == (0, 0, load.kv_budget_mb)


async def test_request_canceled_at_the_moment_of_its_admission_frees_the_slot() -> None:
    model = model_with(endless(""), max_in_flight=1)
    clients = Clients(model.admission)
    await clients.arrive("a1")
    waiter = await clients.arrive("a2")
    first = clients._tasks["a1"]
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)  # a2 is admitted, but its task has not resumed
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert (model.load().in_flight, model.load().queue_depth) == (0, 0)


async def test_request_to_a_full_queue_is_rejected_with_counts_and_retry_after() -> None:
    model = model_with(endless(""), max_in_flight=1, max_queue_depth=0)
    clients = Clients(model.admission)
    await clients.arrive("a1")
    refused = (await clients.arrive("b1")).exception()
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code, refused.type) == (503, "rate_limit_exceeded", "rate_limit_error")
    assert "1 of 1 requests run, 0 of 0 wait" in str(refused)
    assert refused.retry_after and 1 <= refused.retry_after <= 120
    assert model.load().rejected_queue_full == 1
    await clients.end("a1")


async def test_timeouts_in_the_wait_for_a_slot_and_for_memory_have_different_errors() -> None:
    model = model_with(endless(""), max_in_flight=1, max_wait_secs=0)
    clients = Clients(model.admission)
    await clients.arrive("a1")
    with pytest.raises(ApiError, match="busy for 0 s") as refused:
        await (await clients.arrive("b1"))
    assert (refused.value.status, model.load().rejected_timeout) == (503, 1)
    await clients.end("a1")

    model = model_with(endless(""), pages=10, kv_max_wait_secs=0)
    clients = Clients(model.admission)
    await clients.arrive("a1", 100)
    with pytest.raises(ApiError, match="of KV cache") as refused:
        await (await clients.arrive("b1", 100))
    assert (refused.value.status, refused.value.code) == (503, "insufficient_vram")
    assert refused.value.extras == {"free_mb": 3, "required_mb": 7}
    assert refused.value.retry_after
    assert model.load().rejected_kv_timeout == 1
    await clients.end("a1")


async def test_prompt_larger_than_the_kv_cache_is_a_413() -> None:
    model = model_with(endless(""), pages=10)
    with pytest.raises(ApiError) as refused:
        await (await Clients(model.admission).arrive("a1", 160))
    assert (refused.value.status, refused.value.code) == (413, "prompt_too_long_for_vram")
    assert refused.value.extras == {"required_mb": 11, "budget_mb": 10}
    assert refused.value.retry_after is None
    assert model.load().rejected_kv_unservable == 1


async def test_request_above_the_limit_per_principal_is_429_and_an_anonymous_rejection_503() -> None:
    model = model_with(endless(""), max_per_principal=1, anon_max_in_flight=0)
    async with model.admission.admit("a", 1, 1):
        with pytest.raises(ApiError, match="one key may have 1 request") as refused:
            await model.admission.admit("a", 1, 1).__aenter__()
        assert refused.value.status == 429
        with pytest.raises(ApiError, match="API key only") as refused:
            await model.admission.admit("", 1, 1).__aenter__()
        assert refused.value.status == 503
    load = model.load()
    assert (load.rejected_per_principal, load.rejected_anon_yield, load.anon_max_in_flight) == (1, 1, 0)


async def test_closing_the_model_rejects_waiting_and_later_requests() -> None:
    model = model_with(endless(""), max_in_flight=1)
    clients = Clients(model.admission)
    await clients.arrive("a1")
    waiter = await clients.arrive("a2")
    model.admission.close(shutting_down())
    for task in (waiter, await clients.arrive("b1")):
        with pytest.raises(ApiError, match="shutting down"):
            await task
    load = model.load()
    assert (load.in_flight, load.queue_depth) == (1, 0), "admitted requests continue"
    await clients.end("a1")


async def test_request_canceled_before_the_model_closes_ends_as_canceled_and_not_as_rejected() -> None:
    model = model_with(endless(""), max_in_flight=1)
    clients = Clients(model.admission)
    await clients.arrive("a1")
    canceled, waiter = await clients.arrive("a2"), await clients.arrive("a3")
    canceled.cancel()  # the task has not handled the cancellation yet
    model.admission.close(shutting_down())
    await asyncio.wait([canceled, waiter])
    assert canceled.cancelled()
    assert isinstance(waiter.exception(), ApiError)
    await clients.end("a1")


async def test_pages_freed_by_the_engine_without_notice_admit_a_waiting_request() -> None:
    model = model_with(endless(""), pages=10, max_in_flight=2)
    clients = Clients(model.admission)
    async with model.admission.admit("a", 10, 10) as slot:
        await clients.arrive("b1")
        await clients.arrive("c1")
        slot.hold(10 * 16)
        model.engine.free_pages = 0
        await clients.end("b1")  # a slot is free, but no memory
        assert model.load().queue_depth == 1
        model.engine.free_pages = 2  # the engine has preempted the other sequence
        await until(lambda: clients.admitted[-1] == "c1")
    await clients.end("c1")


async def test_max_sequences_of_the_engine_caps_the_configured_max_in_flight() -> None:
    model = scripted_model(endless(""))
    model.engine.options = EngineOptions(max_sequences=16)
    for configured, slots, anonymous in ((None, 16, 15), (4, 4, 4), (99, 16, 15)):
        load = Admission(AdmissionConfig(max_in_flight=configured), model.engine).load("m")
        assert (load.max_in_flight, load.anon_max_in_flight) == (slots, anonymous)


async def test_request_waits_for_its_slot_before_it_reaches_the_engine() -> None:
    model = model_with(endless("x"), max_in_flight=1)
    async with AsyncExitStack() as first:
        events = await first.enter_async_context(aclosing(run(model, [[1]], REQUEST)))
        assert await anext(events) == Started(1)
        assert model.load().anon_in_flight == 1
        waiting = run(model, [[1]], REQUEST)
        begun = asyncio.create_task(anext(waiting))
        await until(lambda: model.load().queue_depth == 1)
        assert len(model.engine.requests) == 1  # type: ignore[attr-defined]
    assert await begun == Started(1)
    await waiting.aclose()
    assert (model.load().in_flight, model.load().queue_depth) == (0, 0)


async def test_slot_of_a_request_is_free_when_its_last_event_is_read() -> None:
    model = model_with(answer("hello"), max_in_flight=1)
    async with aclosing(run(model, [[1]], REQUEST)) as events:
        async for event in events:
            if isinstance(event, Finished):
                assert model.load().in_flight == 0
    assert model.load().kv_available_mb == model.load().kv_budget_mb
