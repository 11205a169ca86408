"""Dividing memory: whatever the sizes, no more is given than there is, and what matters most comes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import DoesNotFitError
from helexa.neuron.engine.ipc.messages import MemoryGrant
from helexa.neuron.engine.loading.fit import LEAST_CONTEXT, alone, divide
from neuron.needing import MIB, needs


def test_with_plenty_of_memory_all_is_granted() -> None:
    asked = needs(state=MIB, snapshots=10)
    assert divide(asked, 10_000 * MIB) == MemoryGrant(total=1730 * MIB, pages=512, sequences=8, snapshots=10)


def test_the_cache_shrinks_before_a_load_is_refused() -> None:
    pages = {room: divide(needs(), room * MIB).pages for room in (4000, 2000, 1500, 1300, 1232)}
    assert pages == {4000: 512, 2000: 200, 1500: 128, 1300: 50, 1232: 32}
    with pytest.raises(DoesNotFitError):
        divide(needs(), 1231 * MIB)


def test_a_refusal_has_the_numbers_and_says_what_would_help() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        divide(needs(), 1220 * MIB + 5)
    assert refused.value.kind == "does_not_fit"
    assert refused.value.details == {
        "required_mb": 1232,
        "free_mb": 1220,
        "weights_mb": 1000,
        "kv_mb": 32,
        "activations_mb": 200,
        "suggestion": 'a smaller quant, a context_length below 2048 or kv_dtype = "int8"',
    }
    assert "needs 1232 MiB (weights 1000, kv 32, activations 200) of cpu, 1220 MiB are free" in str(refused.value)
    with pytest.raises(DoesNotFitError, match="a context_length below 1024 "):
        divide(needs(context=1024), 1210 * MIB)
    with pytest.raises(DoesNotFitError, match=r"; a smaller quant would help$"):
        divide(needs(), 900 * MIB)
    with pytest.raises(DoesNotFitError, match="; a smaller quant, fewer max_step_tokens or fewer max_sequences would"):
        divide(needs(), 1100 * MIB)


def test_loading_may_need_the_most() -> None:
    with pytest.raises(DoesNotFitError, match=r"needs 2000 MiB .*loading 768"):
        divide(needs(loading=1000 * MIB), 1999 * MIB)
    assert divide(needs(loading=1000 * MIB), 2000 * MIB).total == 2000 * MIB


def test_a_cache_of_a_stated_size_is_smaller_than_the_least_if_it_is_so_stated() -> None:
    assert divide(needs(pages=3, share=1.0), 1203 * MIB).pages == 3


def test_fewer_sequences_run_where_their_states_are_large() -> None:
    assert divide(needs(state=100 * MIB), 1800 * MIB) == MemoryGrant(
        total=1628 * MIB, pages=128, sequences=3, snapshots=0
    )
    assert divide(needs(state=100 * MIB), 1332 * MIB) == MemoryGrant(
        total=1332 * MIB, pages=32, sequences=1, snapshots=0
    )


def test_who_is_alone_may_have_what_is_free_up_to_the_limit() -> None:
    assert alone(needs()).pages == 512
    assert alone(needs(limit=1232 * MIB)).pages == 32
    assert alone(needs(free=1232 * MIB, limit=2000 * MIB)).pages == 32


sizes = st.integers(0, 50_000)


@given(
    room=sizes,
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
)
def test_never_more_than_there_is_nor_than_was_asked(room: int, **sizes: int) -> None:
    asked = needs(**sizes)
    least = min(asked.pages, asked.pages_for(min(asked.context, LEAST_CONTEXT)))
    longest = min(least * 64, asked.context)
    cache = least * (asked.page + asked.page_step) + longest * asked.position_step
    smallest = max(asked.weights + asked.step + cache + asked.state, asked.weights + asked.loading)
    if smallest > room:
        with pytest.raises(DoesNotFitError) as refused:
            divide(asked, room)
        assert refused.value.details["required_mb"] == -(-smallest >> 20)
        return
    grant = divide(asked, room)
    assert least <= grant.pages <= asked.pages
    assert 1 <= grant.sequences <= asked.sequences
    assert 0 <= grant.snapshots <= asked.snapshots
    assert smallest <= grant.total <= room
    if not asked.state:  # states may take what the cache would have had
        assert divide(asked, room + 1000).pages >= grant.pages
