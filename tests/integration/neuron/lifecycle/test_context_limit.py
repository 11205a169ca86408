"""The context limit is the smallest limit by memory, speed and configuration, and changes slowly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.neuron.config import ContextLimitConfig, read_config
from helexa.neuron.lifecycle.served_model_and_context_limit import (
    HOLD_SECONDS,
    LEAST_BY_RATE,
    EngineProperties,
    Measurements,
    SteadyRate,
    TokenLimits,
    context_limit,
)

PAGE_BYTES = 1000


def engine_facts(context: int = 131072, pages: int = 4096, cpu: bool = False) -> EngineProperties:
    return EngineProperties(context=context, pages=pages, page_size=64, page_bytes=PAGE_BYTES, cpu=cpu)


def limit(engine: EngineProperties, missing: int = 0, rate: float = 0.0, **settings: object) -> TokenLimits:
    return context_limit(engine, Measurements(missing, rate), ContextLimitConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("engine", "measurements", "settings", "expected"),
    [
        (engine_facts(8192), {}, {}, 8192),  # limited by training
        (engine_facts(131072), {}, {}, 120 * 800 // 1024 * 1024),  # limited by the assumed rate
        (engine_facts(131072), {"rate": 100.0}, {}, 11264),  # limited by the measured rate
        (engine_facts(131072), {"rate": 2000.0}, {}, 131072),
        (engine_facts(131072), {"rate": 100.0}, {"enabled": False}, 131072),
        (engine_facts(131072), {"rate": 0.5}, {}, LEAST_BY_RATE),
        (engine_facts(131072, cpu=True), {}, {}, 600 * 100 // 1024 * 1024),
        (engine_facts(131072, cpu=True), {"rate": 20.0}, {}, 11264),
        (engine_facts(131072), {"rate": 100.0}, {"target_prefill_latency_secs": 60.0}, 5120),
        (engine_facts(131072), {}, {"bootstrap_prefill_tok_per_sec": 100.0}, 11264),
        (engine_facts(8192, pages=100), {}, {}, 6144),  # limited by the cache
        (engine_facts(8192, pages=10), {}, {}, 640),  # not rounded below 1024
        (engine_facts(8192, pages=128), {"missing": 28 * PAGE_BYTES - 1}, {}, 6144),  # limited by missing memory
        (engine_facts(8192, pages=128), {"missing": 128 * PAGE_BYTES}, {}, 0),
        (engine_facts(8192), {}, {"max_prompt_tokens": 3000}, 2048),
        (engine_facts(8192), {}, {"max_prompt_tokens": 30000}, 8192),
    ],
)
def test_context_limit_is_the_minimum_of_all_limits_that_apply(
    engine: EngineProperties, measurements: dict, settings: dict, expected: int
) -> None:
    assert limit(engine, **measurements, **settings).context == expected


def test_quarter_of_the_context_up_to_8192_tokens_is_reserved_for_output() -> None:
    assert limit(engine_facts(65536)) == TokenLimits(context=65536, input=57344, output=8192)
    assert limit(engine_facts(8192)) == TokenLimits(context=8192, input=6144, output=2048)
    assert limit(engine_facts(8192), output_reserve_tokens=512) == TokenLimits(context=8192, input=7680, output=512)
    assert limit(engine_facts(8192), missing=10**9) == TokenLimits(context=0, input=0, output=0)


@given(
    st.builds(EngineProperties, *[st.integers(1, 300_000), *[st.integers(1, 5000)] * 3], st.booleans()),
    st.builds(Measurements, st.integers(0, 10**8), st.floats(0, 10**5)),
    st.builds(ContextLimitConfig, enabled=st.booleans(), max_prompt_tokens=st.integers(0, 10**6)),
)
def test_context_limit_stays_within_all_limits_for_random_measurements(
    engine: EngineProperties, measurements: Measurements, settings: ContextLimitConfig
) -> None:
    result = context_limit(engine, measurements, settings)
    assert result.input is not None
    assert result.output is not None
    assert (
        0 <= result.context <= min(engine.context, engine.pages * engine.page_size, settings.max_prompt_tokens or 10**9)
    )
    assert result.context <= 1024 or result.context % 1024 == 0
    assert result.input + result.output == result.context
    assert 4 * result.output <= result.context
    larger = context_limit(engine, Measurements(measurements.missing_bytes // 2, measurements.tok_s_prefill), settings)
    assert larger.context >= result.context


def test_former_variable_neuron_max_prompt_tokens_limits_prompts() -> None:
    config = read_config(None, {"NEURON_MAX_PROMPT_TOKENS": "16384"})
    assert config.harness.torch.context_limit.max_prompt_tokens == 16384


def test_prefill_rate_for_the_context_limit_rises_at_once_and_falls_after_a_hold_time() -> None:
    now = 0.0
    rate = SteadyRate(100.0, lambda: now)

    def rate_after(measured: float) -> float:
        rate.measure(measured)
        return rate.rate

    assert rate.rate == 100.0  # before a measurement
    assert rate_after(150.0) == 150.0
    assert rate_after(80.0) == 150.0
    now = HOLD_SECONDS - 1
    assert rate_after(60.0) == 150.0
    now = HOLD_SECONDS
    assert rate_after(60.0) == 80.0  # the highest measurement since the rate was lower
    now = 2 * HOLD_SECONDS - 1
    assert rate_after(50.0) == 80.0
    now = 9 * HOLD_SECONDS
    assert rate_after(90.0) == 90.0


@given(st.lists(st.tuples(st.floats(0, 400), st.floats(1, 1000)), max_size=60))
def test_prefill_rate_for_the_context_limit_never_falls_before_the_hold_time(steps: list[tuple[float, float]]) -> None:
    now = 0.0
    rate = SteadyRate(10.0, lambda: now)
    changes = [(0.0, 10.0)]
    for wait, measured in steps:
        now += wait
        rate.measure(measured)
        current = rate.rate
        assert current >= measured
        if current != changes[-1][1]:
            assert current > changes[-1][1] or now - changes[-1][0] >= HOLD_SECONDS
            changes.append((now, current))
