"""What is kept of responses: bounded, and nobody else's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.neuron.config import ResponsesConfig
from helexa.neuron.requests.response_store import ResponseStore

MIB = 1 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def store(mb: int = 1, entries: int = 100, secs: float = 60.0, clock: Clock | None = None) -> ResponseStore:
    return ResponseStore(ResponsesConfig(store_mb=mb, store_entries=entries, store_secs=secs), clock or Clock())


def test_a_response_is_found_by_whose_it_is() -> None:
    kept = store()
    kept.put("resp_1", "anna", b"{}", b"[1]")
    entry = kept.find("resp_1", "anna")
    assert entry is not None and (entry.body, entry.items) == (b"{}", b"[1]")
    for stranger in ("bert", ""):
        assert kept.find("resp_1", stranger) is None
        assert not kept.remove("resp_1", stranger)
    assert kept.find("resp_2", "anna") is None
    assert kept.remove("resp_1", "anna")
    assert not kept.remove("resp_1", "anna")
    assert len(kept) == 0


def test_time_ends_what_is_kept() -> None:
    clock = Clock()
    kept = store(secs=10, clock=clock)
    kept.put("old", "", b"x", b"")
    clock.now += 9
    kept.put("new", "", b"x", b"")
    assert kept.find("old", "") is not None
    clock.now += 1
    assert kept.find("old", "") is None
    assert len(kept) == 1


def test_a_count_bounds_what_is_kept() -> None:
    kept = store(entries=2)
    for name in ("a", "b", "c"):
        kept.put(name, "", b"x", b"")
    assert [kept.find(name, "") is not None for name in ("a", "b", "c")] == [False, True, True]


def test_one_who_fills_the_store_loses_his_own() -> None:
    kept = store()
    kept.put("small", "anna", b"x" * 1000, b"")
    for name in ("one", "two", "three"):
        kept.put(name, "bert", b"x" * (MIB // 3), b"x" * 1000)
    assert kept.find("small", "anna") is not None
    assert [kept.find(name, "bert") is not None for name in ("one", "two", "three")] == [False, True, True]


def test_nobody_pushes_out_one_who_has_less() -> None:
    kept = store()
    kept.put("small", "anna", b"x" * (MIB // 3), b"")
    kept.put("large", "bert", b"x" * (MIB - 1000), b"")
    assert kept.find("small", "anna") is not None
    assert kept.find("large", "bert") is None


def test_what_is_larger_than_all_is_not_kept_and_costs_nothing() -> None:
    kept = store()
    kept.put("small", "", b"x", b"")
    kept.put("huge", "", b"x" * MIB, b"x")
    assert kept.find("huge", "") is None
    assert kept.find("small", "") is not None


@pytest.mark.parametrize(("mb", "enabled"), [(0, False), (1, True)])
def test_no_room_is_off(mb: int, enabled: bool) -> None:
    kept = store(mb=mb)
    assert kept.enabled is enabled
    kept.put("a", "", b"x", b"")
    assert (kept.find("a", "") is not None) is enabled


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove", "wait"]), st.integers(0, 9), st.sampled_from("abc"), st.integers(1, 600)
    ),
    max_size=60,
)


@given(_STEPS)
def test_it_never_holds_more_than_it_may(steps: list[tuple[str, int, str, int]]) -> None:
    clock = Clock()
    kept = store(entries=7, secs=20, clock=clock)
    put: list[tuple[str, str]] = []
    for number, (step, seconds, principal, size) in enumerate(steps):
        match step:
            case "put":
                put.append((f"resp_{number}", principal))
                kept.put(*put[-1], b"x" * (size << 10), b"")
            case "remove" if put:
                kept.remove(*put.pop(seconds % len(put)))
            case _:
                clock.now += seconds
        found = [entry for one in put if (entry := kept.find(*one)) is not None]
        assert len(found) == len(kept) <= 7
        assert sum(entry.size for entry in found) <= MIB
    for one in put:
        kept.remove(*one)
    kept.put("all", "", b"x" * MIB, b"")
    assert kept.find("all", "") is not None  # what is gone takes no room
