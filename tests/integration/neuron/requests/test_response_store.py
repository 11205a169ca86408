"""The response store: limits, expiry, and separation of principals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.neuron.config import ResponsesConfig
from helexa.neuron.routes.stored_responses import ResponseStore

MIB = 1 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def new_store(mb: int = 1, entries: int = 100, secs: float = 60.0, clock: Clock | None = None) -> ResponseStore:
    return ResponseStore(ResponsesConfig(store_mb=mb, store_entries=entries, store_secs=secs), clock or Clock())


def test_stored_response_is_found_only_by_its_principal() -> None:
    store = new_store()
    store.put("resp_1", "anna", b"{}", b"[1]")
    entry = store.find("resp_1", "anna")
    assert entry is not None and (entry.body, entry.items) == (b"{}", b"[1]")
    for stranger in ("bert", ""):
        assert store.find("resp_1", stranger) is None
        assert not store.remove("resp_1", stranger)
    assert store.find("resp_2", "anna") is None
    assert store.remove("resp_1", "anna")
    assert not store.remove("resp_1", "anna")
    assert len(store) == 0


def test_stored_response_is_not_found_after_its_lifetime() -> None:
    clock = Clock()
    store = new_store(secs=10, clock=clock)
    store.put("old", "", b"x", b"")
    clock.now += 9
    store.put("new", "", b"x", b"")
    assert store.find("old", "") is not None
    clock.now += 1
    assert store.find("old", "") is None
    assert len(store) == 1


def test_storing_more_responses_than_allowed_evicts_the_oldest() -> None:
    store = new_store(entries=2)
    for name in ("a", "b", "c"):
        store.put(name, "", b"x", b"")
    assert [store.find(name, "") is not None for name in ("a", "b", "c")] == [False, True, True]


def test_principal_that_fills_the_response_store_loses_its_own_oldest_response() -> None:
    store = new_store()
    store.put("small", "anna", b"x" * 1000, b"")
    for name in ("one", "two", "three"):
        store.put(name, "bert", b"x" * (MIB // 3), b"x" * 1000)
    assert store.find("small", "anna") is not None
    assert [store.find(name, "bert") is not None for name in ("one", "two", "three")] == [False, True, True]


def test_store_evicts_a_response_of_the_principal_that_stores_most() -> None:
    store = new_store()
    store.put("small", "anna", b"x" * (MIB // 3), b"")
    store.put("large", "bert", b"x" * (MIB - 1000), b"")
    assert store.find("small", "anna") is not None
    assert store.find("large", "bert") is None


def test_response_larger_than_the_store_is_not_stored_and_evicts_nothing() -> None:
    store = new_store()
    store.put("small", "", b"x", b"")
    store.put("huge", "", b"x" * MIB, b"x")
    assert store.find("huge", "") is None
    assert store.find("small", "") is not None


@pytest.mark.parametrize(("mb", "enabled"), [(0, False), (1, True)])
def test_size_0_disables_the_response_store(mb: int, enabled: bool) -> None:
    store = new_store(mb=mb)
    assert store.enabled is enabled
    store.put("a", "", b"x", b"")
    assert (store.find("a", "") is not None) is enabled


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove", "wait"]), st.integers(0, 9), st.sampled_from("abc"), st.integers(1, 600)
    ),
    max_size=60,
)


@given(_STEPS)
def test_response_store_never_exceeds_its_limits_for_random_operations(steps: list[tuple[str, int, str, int]]) -> None:
    clock = Clock()
    store = new_store(entries=7, secs=20, clock=clock)
    put: list[tuple[str, str]] = []
    for number, (step, seconds, principal, size) in enumerate(steps):
        match step:
            case "put":
                put.append((f"resp_{number}", principal))
                store.put(*put[-1], b"x" * (size << 10), b"")
            case "remove" if put:
                store.remove(*put.pop(seconds % len(put)))
            case _:
                clock.now += seconds
        entries = [entry for key in put if (entry := store.find(*key)) is not None]
        assert len(entries) == len(store) <= 7
        assert sum(entry.size for entry in entries) <= MIB
    for key in put:
        store.remove(*key)
    store.put("all", "", b"x" * MIB, b"")
    assert store.find("all", "") is not None  # removed entries count no bytes
