"""A model's limits by the current state of its engine, memory and speed."""

import pytest
from msgspec.structs import replace

from helexa.core.errors import ApiError
from helexa.core.node_reports import Limit, ModelSpec, Servable
from helexa.core.wire.request import GenerationRequest
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.lifecycle.served_model_and_context_limit import HOLD_SECONDS, ServedModel
from helexa.neuron.requests.inference import run
from helexa.neuron.text.model_text import ModelText
from neuron.scripted_engine import CONTEXT, TOKENIZER, ScriptedEngine, answer, scripted_model


def engine_of(model: ServedModel) -> ScriptedEngine:
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine


class Machine:
    """A simulated engine with a long context. A step takes `base` seconds, and `row` seconds more per row."""

    def __init__(self, base: float, row: float) -> None:
        self.now = 0.0
        self._cost = (base, row)
        self._scheduler = Scheduler(EngineOptions(speculation=False, max_sequences=64), PagePool(4096, 64))
        engine = ScriptedEngine(answer("x"))
        engine.ready = replace(engine.ready, device="cuda:0", context_length=262144, kv_pages=4096, page_size=64)
        self.model = ServedModel("m", ModelSpec(model_id="m"), ModelText(TOKENIZER, None, {}), engine, clock=self.clock)  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.now

    def submit(self, number: int, prompt: int) -> None:
        request = Generate(id=number, prompt=[number] * prompt, max_tokens=100, sampling=SamplingParams())
        assert self._scheduler.add(Sequence(request)) is None

    def run(self) -> None:
        """Run steps until all requests are finished."""
        base, row = self._cost
        while not self._scheduler.idle:
            plan = self._scheduler.plan()
            seconds = base + row * sum(entry.count for entry in plan)
            self.now += seconds
            for output in self._scheduler.commit(plan, [9 for entry in plan if entry.samples], seconds):
                if output.timing is not None:
                    self.model.record(output.timing, 1000, 100)


def test_model_report_contains_the_token_limits_that_apply() -> None:
    model = scripted_model(answer("x"))
    assert model.limit == (CONTEXT, CONTEXT * 3 // 4, CONTEXT // 4)
    assert model.info().limit == Limit(context=CONTEXT, input=CONTEXT * 3 // 4, output=CONTEXT // 4)
    assert model.context_length == CONTEXT
    assert model.info().servable == Servable(ok=True)


async def test_requests_to_a_dead_engine_are_rejected() -> None:
    model = scripted_model(answer("x"))
    engine_of(model).alive = False
    assert model.servable == Servable(ok=False, reason="engine_down", detail="the model's engine is not running")
    with pytest.raises(ApiError) as refused:
        await anext(run(model, [[1]], GenerationRequest.from_value({"model": "m"})))
    assert (refused.value.status, refused.value.retry_after) == (503, 5)


def test_context_limit_shrinks_to_0_with_missing_kv_cache_memory() -> None:
    model = scripted_model(answer("x"))
    pages = model.engine.ready.kv_pages
    engine_of(model).missing_bytes = pages - 8  # a page has one byte
    assert model.limit.context == 8 * 16
    assert model.servable.ok
    engine_of(model).missing_bytes = pages
    assert model.servable.reason == "insufficient_memory"
    engine_of(model).missing_bytes = 0
    assert model.limit.context == CONTEXT


def test_prefill_rate_for_the_context_limit_is_measured_only_with_long_prompts() -> None:
    machine = Machine(base=0.0, row=0.0005)
    assert machine.model.limit.context == 120 * 800 // 1024 * 1024
    machine.submit(1, prompt=200)
    machine.run()
    assert machine.model.limit.context == 120 * 800 // 1024 * 1024
    machine.submit(2, prompt=1000)
    machine.run()
    assert machine.model.limit.context == 120 * 2000 // 1024 * 1024


def test_many_concurrent_prompts_do_not_lower_the_context_limit() -> None:
    """Waits for other prompts and for decoding sequences do not lower the measured prefill rate."""
    machine = Machine(base=0.020, row=0.0005)
    machine.submit(0, prompt=2000)
    machine.run()
    limit = machine.model.limit
    assert limit.context == int(120 * 2000 / (4 * 0.020 + 2000 * 0.0005)) // 1024 * 1024
    for first in (1, 65, 129):
        machine.now += HOLD_SECONDS
        for number in range(first, first + 64):
            machine.submit(number, prompt=1000)
        machine.run()
    assert machine.model.limit.context >= limit.context


def test_reading_the_context_limit_does_not_change_the_measured_rate() -> None:
    machine = Machine(base=0.0, row=0.01)
    machine.submit(1, prompt=1000)
    machine.run()
    limit = machine.model.limit
    machine.now += HOLD_SECONDS
    assert machine.model.limit == limit
    machine.submit(2, prompt=1000)
    machine.run()
    assert machine.model.limit.context == 120 * 100 // 1024 * 1024
