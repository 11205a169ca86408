"""Dividing memory: a grant never exceeds the free memory, and weights and steps come before the cache."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import DoesNotFitError
from helexa.neuron.engine.ipc.messages import MemoryGrant
from helexa.neuron.engine.loading.memory_division import LEAST_CONTEXT, divide, divide_free_memory
from neuron.memory_requests import MIB, needs


def test_memory_request_is_granted_completely_if_enough_memory_is_free() -> None:
    request = needs(state=MIB, snapshots=10)
    assert divide(request, 10_000 * MIB) == MemoryGrant(total=1730 * MIB, pages=512, sequences=8, snapshots=10)


def test_kv_cache_is_reduced_to_its_minimum_before_a_load_is_rejected() -> None:
    pages = {free: divide(needs(), free * MIB).pages for free in (4000, 2000, 1500, 1300, 1232)}
    assert pages == {4000: 512, 2000: 200, 1500: 128, 1300: 50, 1232: 32}
    with pytest.raises(DoesNotFitError):
        divide(needs(), 1231 * MIB)


def test_rejected_load_reports_the_needed_sizes_and_suggests_settings() -> None:
    with pytest.raises(DoesNotFitError) as rejected:
        divide(needs(), 1220 * MIB + 5)
    assert rejected.value.kind == "does_not_fit"
    assert rejected.value.details == {
        "required_mb": 1232,
        "free_mb": 1220,
        "weights_mb": 1000,
        "kv_mb": 32,
        "activations_mb": 200,
        "suggestion": 'a smaller quant, a context_length below 2048 or kv_dtype = "int8"',
    }
    assert "needs 1.20 GB (weights 1000 MB, kv 32 MB, activations 200 MB) of cpu, 1.19 GB are free" in str(
        rejected.value
    )
    with pytest.raises(DoesNotFitError, match="a context_length below 1024 "):
        divide(needs(context=1024), 1210 * MIB)
    with pytest.raises(DoesNotFitError, match="a smaller quant or a context_length below 2048 would help"):
        divide(needs(kv_bits=8), 1220 * MIB)
    with pytest.raises(DoesNotFitError, match=r"; a smaller quant would help$"):
        divide(needs(), 900 * MIB)
    with pytest.raises(DoesNotFitError, match="; a smaller quant, fewer max_step_tokens or fewer max_sequences would"):
        divide(needs(), 1100 * MIB)


def test_load_is_rejected_if_only_its_peak_while_loading_does_not_fit() -> None:
    with pytest.raises(DoesNotFitError, match=r"needs 1\.95 GB .*loading 768 MB"):
        divide(needs(loading=1000 * MIB), 1999 * MIB)
    assert divide(needs(loading=1000 * MIB), 2000 * MIB).total == 2000 * MIB


def test_configured_kv_cache_size_may_be_smaller_than_the_default_minimum() -> None:
    assert divide(needs(pages=3, share=1.0), 1203 * MIB).pages == 3


def test_sliding_window_layers_leave_memory_for_more_kv_pages() -> None:
    """As many window pages as suffice for all sequences are granted, and no more."""
    all_layers, some_layers = needs(pages=4096, share=1.0), needs(pages=4096, share=1.0, page=MIB // 4)
    some_layers = msgspec.structs.replace(some_layers, window_page=MIB - MIB // 4, window_pages=100)
    memory = 1600 * MIB
    assert divide(all_layers, memory).pages == 400
    assert divide(some_layers, memory).pages == 4 * (400 - 75)
    assert divide(some_layers, 1250 * MIB).pages == divide(all_layers, 1250 * MIB).pages == 50


def test_large_recurrent_states_reduce_the_number_of_sequences() -> None:
    assert divide(needs(state=100 * MIB), 1800 * MIB) == MemoryGrant(
        total=1628 * MIB, pages=128, sequences=3, snapshots=0
    )
    assert divide(needs(state=100 * MIB), 1332 * MIB) == MemoryGrant(
        total=1332 * MIB, pages=32, sequences=1, snapshots=0
    )


def test_engine_without_a_server_is_granted_the_free_memory_up_to_the_limit() -> None:
    assert divide_free_memory(needs()).pages == 512
    assert divide_free_memory(needs(limit=1232 * MIB)).pages == 32
    assert divide_free_memory(needs(free=1232 * MIB, limit=2000 * MIB)).pages == 32


sizes = st.integers(0, 50_000)


@given(
    free=sizes,
    weights=sizes,
    loading=sizes,
    step=sizes,
    page_step=st.integers(0, 9),
    position_step=st.integers(0, 9),
    page=st.integers(1, 500),
    pages=st.integers(1, 2000),
    share=st.sampled_from([0.25, 0.8, 1.0]),
    context=st.integers(1, 40_000),
    state=st.integers(0, 500),
    sequences=st.integers(1, 64),
    snapshots=st.integers(0, 100),
    window_page=st.integers(0, 500),
    window_pages=st.integers(1, 300),
)
def test_memory_grant_exceeds_neither_the_free_memory_nor_the_request(free: int, **sizes: int) -> None:
    request = needs(**sizes)
    least = min(request.pages, request.pages_for(min(request.context, LEAST_CONTEXT)))
    longest = min(least * 64, request.context)
    window_pages = min(least, request.window_pages)
    cache = least * (request.page + request.page_step) + longest * request.position_step
    cache += window_pages * request.window_page
    smallest = max(request.weights + request.step + cache + request.state, request.weights + request.loading)
    if smallest > free:
        with pytest.raises(DoesNotFitError) as rejected:
            divide(request, free)
        assert rejected.value.details["required_mb"] == -(-smallest >> 20)
        return
    grant = divide(request, free)
    assert least <= grant.pages <= request.pages
    assert 1 <= grant.sequences <= request.sequences
    assert 0 <= grant.snapshots <= request.snapshots
    assert smallest <= grant.total <= free
    if not request.state:  # with recurrent states, more memory may mean more states and fewer pages
        assert divide(request, free + 1000).pages >= grant.pages
