"""How long a context is: the smallest of what memory, speed and configuration allow, and steady."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.fleet import Limit
from helexa.neuron.config import ContextLimitConfig, read_config
from helexa.neuron.lifecycle.context_limit import (
    HOLD_SECONDS,
    LEAST_BY_RATE,
    Facts,
    Readings,
    SteadyRate,
    context_limit,
)

PAGE_BYTES = 1000


def facts(context: int = 131072, pages: int = 4096, cpu: bool = False) -> Facts:
    return Facts(context=context, pages=pages, page_size=64, page_bytes=PAGE_BYTES, cpu=cpu)


def limit(of: Facts, missing: int = 0, rate: float = 0.0, **settings: object) -> Limit:
    return context_limit(of, Readings(missing, rate), ContextLimitConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("of", "readings", "settings", "expected"),
    [
        (facts(8192), {}, {}, 8192),  # as trained
        (facts(131072), {}, {}, 120 * 800 // 1024 * 1024),  # by the rate that is guessed
        (facts(131072), {"rate": 100.0}, {}, 11264),  # by the measured one
        (facts(131072), {"rate": 2000.0}, {}, 131072),
        (facts(131072), {"rate": 100.0}, {"enabled": False}, 131072),
        (facts(131072), {"rate": 0.5}, {}, LEAST_BY_RATE),
        (facts(131072, cpu=True), {}, {}, 600 * 100 // 1024 * 1024),
        (facts(131072, cpu=True), {"rate": 20.0}, {}, 11264),
        (facts(131072), {"rate": 100.0}, {"target_prefill_latency_secs": 60.0}, 5120),
        (facts(131072), {}, {"bootstrap_prefill_tok_per_sec": 100.0}, 11264),
        (facts(8192, pages=100), {}, {}, 6144),  # by the cache
        (facts(8192, pages=10), {}, {}, 640),  # not rounded below 1024
        (facts(8192, pages=128), {"missing": 28 * PAGE_BYTES - 1}, {}, 6144),  # by memory that is gone
        (facts(8192, pages=128), {"missing": 128 * PAGE_BYTES}, {}, 0),
        (facts(8192), {}, {"max_prompt_tokens": 3000}, 2048),
        (facts(8192), {}, {"max_prompt_tokens": 30000}, 8192),
    ],
)
def test_the_smallest_bound_holds(of: Facts, readings: dict, settings: dict, expected: int) -> None:
    assert limit(of, **readings, **settings).context == expected


def test_what_is_left_to_the_answer() -> None:
    assert limit(facts(65536)) == Limit(context=65536, input=57344, output=8192)
    assert limit(facts(8192)) == Limit(context=8192, input=6144, output=2048)
    assert limit(facts(8192), output_reserve_tokens=512) == Limit(context=8192, input=7680, output=512)
    assert limit(facts(8192), missing=10**9) == Limit(context=0, input=0, output=0)


@given(
    st.builds(Facts, *[st.integers(1, 300_000), *[st.integers(1, 5000)] * 3], st.booleans()),
    st.builds(Readings, st.integers(0, 10**8), st.floats(0, 10**5)),
    st.builds(ContextLimitConfig, enabled=st.booleans(), max_prompt_tokens=st.integers(0, 10**6)),
)
def test_it_is_never_more_than_any_bound(of: Facts, readings: Readings, settings: ContextLimitConfig) -> None:
    found = context_limit(of, readings, settings)
    assert found.input is not None
    assert found.output is not None
    assert 0 <= found.context <= min(of.context, of.pages * of.page_size, settings.max_prompt_tokens or 10**9)
    assert found.context <= 1024 or found.context % 1024 == 0
    assert found.input + found.output == found.context
    assert 4 * found.output <= found.context
    more = context_limit(of, Readings(readings.missing_bytes // 2, readings.tok_s_prefill), settings)
    assert more.context >= found.context


def test_the_variable_of_old_bounds_prompts() -> None:
    config = read_config(None, {"NEURON_MAX_PROMPT_TOKENS": "16384"})
    assert config.harness.torch.context_limit.max_prompt_tokens == 16384


def test_a_rate_rises_at_once_and_falls_late() -> None:
    now = 0.0
    rate = SteadyRate(100.0, lambda: now)

    def told(measured: float) -> float:
        rate.measure(measured)
        return rate.told

    assert rate.told == 100.0  # nothing was measured
    assert told(150.0) == 150.0
    assert told(80.0) == 150.0
    now = HOLD_SECONDS - 1
    assert told(60.0) == 150.0
    now = HOLD_SECONDS
    assert told(60.0) == 80.0  # the best since it was lower
    now = 2 * HOLD_SECONDS - 1
    assert told(50.0) == 80.0
    now = 9 * HOLD_SECONDS
    assert told(90.0) == 90.0


@given(st.lists(st.tuples(st.floats(0, 400), st.floats(1, 1000)), max_size=60))
def test_what_was_told_holds_for_a_while(steps: list[tuple[float, float]]) -> None:
    now = 0.0
    rate = SteadyRate(10.0, lambda: now)
    changes = [(0.0, 10.0)]
    for wait, measured in steps:
        now += wait
        rate.measure(measured)
        told = rate.told
        assert told >= measured
        if told != changes[-1][1]:
            assert told > changes[-1][1] or now - changes[-1][0] >= HOLD_SECONDS
            changes.append((now, told))
