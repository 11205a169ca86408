"""What a model may be asked for, as its engine, its memory and its speed are now."""

import pytest

from helexa.core.errors import ApiError
from helexa.core.fleet import Limit, Servable
from helexa.core.wire.generation import GenerationRequest
from helexa.neuron.engine.messages import Timing
from helexa.neuron.inference import run
from helexa.neuron.model import ServedModel
from neuron.scripted_engine import CONTEXT, ScriptedEngine, answer, scripted_model


def engine_of(model: ServedModel) -> ScriptedEngine:
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine


def prefilled(tokens: int, seconds: float) -> tuple[Timing, int, int]:
    return Timing(queue_ms=0, prefill_ms=1000 * seconds, decode_ms=1), tokens, 2


def test_what_is_advertised_is_what_requests_are_held_to() -> None:
    model = scripted_model(answer("x"))
    assert model.info().limit == model.limit == Limit(context=CONTEXT, input=CONTEXT * 3 // 4, output=CONTEXT // 4)
    assert model.context_length == CONTEXT
    assert model.info().servable == Servable(ok=True)


async def test_a_dead_engine_serves_nothing() -> None:
    model = scripted_model(answer("x"))
    engine_of(model).alive = False
    assert model.servable == Servable(ok=False, reason="engine_down", detail="the model's engine is not running")
    with pytest.raises(ApiError) as refused:
        await anext(run(model, [1], GenerationRequest(model="m")))
    assert (refused.value.status, refused.value.retry_after) == (503, 5)


def test_memory_that_is_gone_shrinks_the_context_and_in_the_end_nothing_is_served() -> None:
    model = scripted_model(answer("x"))
    engine_of(model).missing_bytes = 92  # of 100, one for each page
    assert model.limit.context == 8 * 16
    assert model.servable.ok
    engine_of(model).missing_bytes = 100
    assert model.servable.reason == "insufficient_memory"
    engine_of(model).missing_bytes = 0
    assert model.limit.context == CONTEXT


def test_only_long_prompts_tell_how_fast_prompts_are_read() -> None:
    model = scripted_model(answer("x"))
    model.record(*prefilled(tokens=20, seconds=10))
    assert model._prefill_rate == 0
    model.record(*prefilled(tokens=500, seconds=10))
    assert model._prefill_rate == 50
