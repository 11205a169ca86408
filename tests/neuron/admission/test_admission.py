"""Admission with real tasks: waiting, giving up, being turned away with numbers, and runs that go through it."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec
import pytest

from helexa.core.errors import ApiError, shutting_down
from helexa.core.wire.generation import GenerationRequest
from helexa.neuron.admission.admission import Admission
from helexa.neuron.config import AdmissionConfig
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.events import Finished, Started
from helexa.neuron.lifecycle.model import ServedModel
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


class Users:
    """Requests that hold their seats, one task each, until they are told to end."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, prompt: int = 10) -> asyncio.Task[None]:
        task = self._tasks[name] = asyncio.create_task(self._sit(name, prompt))
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    async def end(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)

    async def _sit(self, name: str, prompt: int) -> None:
        async with self.admission.seat(name[0], prompt, 10):
            self.inside.append(name)
            await asyncio.Event().wait()


async def test_waiters_follow_and_counters_return_to_zero() -> None:
    model = model_with(endless(""), max_in_flight=2)
    users = Users(model.admission)
    for name in ("a1", "a2", "a3", "a4", "b1"):
        await users.come(name)
    assert users.inside == ["a1", "a2"]
    load = model.load()
    assert (load.in_flight, load.queue_depth, load.max_in_flight, load.max_queue_depth) == (2, 3, 2, 256)
    await users.end("a3")  # a client that hangs up while it waits
    await users.end("a1")
    await users.end("a2")
    assert sorted(users.inside[2:]) == ["a4", "b1"]
    for name in ("a4", "b1"):
        await users.end(name)
    load = model.load()
    assert (load.in_flight, load.queue_depth, load.kv_available_mb) == (0, 0, load.kv_budget_mb)


async def test_who_is_let_in_and_gone_at_the_same_moment_leaves_nothing() -> None:
    model = model_with(endless(""), max_in_flight=1)
    users = Users(model.admission)
    await users.come("a1")
    waiter = await users.come("a2")
    first = users._tasks["a1"]
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)  # a2 has its seat, but did not run since
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert (model.load().in_flight, model.load().queue_depth) == (0, 0)


async def test_a_full_queue_is_told_with_numbers_and_a_date() -> None:
    model = model_with(endless(""), max_in_flight=1, max_queue_depth=0)
    users = Users(model.admission)
    await users.come("a1")
    refused = (await users.come("b1")).exception()
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code, refused.type) == (503, "rate_limit_exceeded", "rate_limit_error")
    assert "1 of 1 requests run, 0 of 0 wait" in str(refused)
    assert refused.retry_after and 1 <= refused.retry_after <= 120
    assert model.load().rejected_queue_full == 1
    await users.end("a1")


async def test_a_wait_for_a_seat_and_one_for_memory_end_differently() -> None:
    model = model_with(endless(""), max_in_flight=1, max_wait_secs=0)
    users = Users(model.admission)
    await users.come("a1")
    with pytest.raises(ApiError, match="busy for 0 s") as refused:
        await (await users.come("b1"))
    assert (refused.value.status, model.load().rejected_timeout) == (503, 1)
    await users.end("a1")

    model = model_with(endless(""), pages=10, kv_max_wait_secs=0)
    users = Users(model.admission)
    await users.come("a1", 100)
    with pytest.raises(ApiError, match="keys and values") as refused:
        await (await users.come("b1", 100))
    assert (refused.value.status, refused.value.code) == (503, "insufficient_vram")
    assert refused.value.extras == {"free_mb": 3, "required_mb": 7}
    assert refused.value.retry_after
    assert model.load().rejected_kv_timeout == 1
    await users.end("a1")


async def test_a_prompt_that_can_never_fit_is_a_413() -> None:
    model = model_with(endless(""), pages=10)
    with pytest.raises(ApiError) as refused:
        await (await Users(model.admission).come("a1", 160))
    assert (refused.value.status, refused.value.code) == (413, "prompt_too_long_for_vram")
    assert refused.value.extras == {"required_mb": 11, "budget_mb": 10}
    assert refused.value.retry_after is None
    assert model.load().rejected_kv_unservable == 1


async def test_a_cap_is_a_429_and_anonymous_callers_are_told_why() -> None:
    model = model_with(endless(""), max_per_principal=1, anon_max_in_flight=0)
    async with model.admission.seat("a", 1, 1):
        with pytest.raises(ApiError, match="one key may have 1 request") as refused:
            await model.admission.seat("a", 1, 1).__aenter__()
        assert refused.value.status == 429
        with pytest.raises(ApiError, match="API key only") as refused:
            await model.admission.seat("", 1, 1).__aenter__()
        assert refused.value.status == 503
    load = model.load()
    assert (load.rejected_per_principal, load.rejected_anon_yield, load.anon_max_in_flight) == (1, 1, 0)


async def test_closing_refuses_those_who_wait_and_those_who_come() -> None:
    model = model_with(endless(""), max_in_flight=1)
    users = Users(model.admission)
    await users.come("a1")
    waiter = await users.come("a2")
    model.admission.close(shutting_down())
    for task in (waiter, await users.come("b1")):
        with pytest.raises(ApiError, match="shutting down"):
            await task
    load = model.load()
    assert (load.in_flight, load.queue_depth) == (1, 0), "who is inside goes on"
    await users.end("a1")


async def test_who_hangs_up_as_the_model_goes_away_is_no_trouble() -> None:
    model = model_with(endless(""), max_in_flight=1)
    users = Users(model.admission)
    await users.come("a1")
    gone, waiter = await users.come("a2"), await users.come("a3")
    gone.cancel()  # it has not noticed yet
    model.admission.close(shutting_down())
    await asyncio.wait([gone, waiter])
    assert gone.cancelled()
    assert isinstance(waiter.exception(), ApiError)
    await users.end("a1")


async def test_memory_that_comes_back_unasked_is_found_before_the_wait_ends() -> None:
    model = model_with(endless(""), pages=10, max_in_flight=2)
    users = Users(model.admission)
    async with model.admission.seat("a", 10, 10) as seat:
        await users.come("b1")
        await users.come("c1")
        seat.hold(10 * 16)
        model.engine.free_pages = 0
        await users.end("b1")  # a seat is free, but no memory
        assert model.load().queue_depth == 1
        model.engine.free_pages = 2  # the engine has put the other one off
        await until(lambda: users.inside[-1] == "c1")
    await users.end("c1")


async def test_ceilings_are_those_of_the_engine_unless_they_are_lower() -> None:
    model = scripted_model(endless(""))
    model.engine.options = EngineOptions(max_sequences=16)
    for asked, seats, anonymous in ((None, 16, 15), (4, 4, 4), (99, 16, 15)):
        load = Admission(AdmissionConfig(max_in_flight=asked), model.engine).load("m")
        assert (load.max_in_flight, load.anon_max_in_flight) == (seats, anonymous)


async def test_a_run_waits_for_its_seat_before_it_begins() -> None:
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


async def test_the_seat_is_free_before_the_last_event_is_read() -> None:
    model = model_with(answer("hello"), max_in_flight=1)
    async with aclosing(run(model, [[1]], REQUEST)) as events:
        async for event in events:
            if isinstance(event, Finished):
                assert model.load().in_flight == 0
    assert model.load().kv_available_mb == model.load().kv_budget_mb
