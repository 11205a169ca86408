"""Where models are loaded, what leaves for them and when: decisions as pure functions of a situation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.catalogue import Catalogue, Profile
from helexa.core.errors import ApiError
from helexa.core.fleet import Discovery, Health, ModelInfo
from helexa.cortex.config import EvictionSection
from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.cortex.lifecycle.evictor import clearing, expired
from helexa.cortex.lifecycle.explain import explain
from helexa.cortex.lifecycle.fleet_snapshot import Failure, FleetSnapshot
from helexa.cortex.lifecycle.history import MAX_BACKOFF_SECS, History
from helexa.cortex.lifecycle.memory import READING_LAG_SECS, Change, MemoryBook, beyond
from helexa.cortex.lifecycle.placement import Cold, Hold, place
from helexa.cortex.lifecycle.swap_queue import decide

NOW = 1000.0


def node(name: str, *models: str, gpus: Sequence[int] = (24000,), free: Sequence[int] = (), **fields: Any) -> Node:
    """A healthy node that has `models`; without `free` it does not tell what is free."""
    devices = [{"index": i, "name": "GPU", "vram_total_mb": mb} for i, mb in enumerate(gpus)]
    facts = {"hostname": name, "os": "Linux", "memory_total_mb": 16000, "devices": devices}
    readings = [{"index": i, "vram_used_mb": 0, "vram_free_mb": mb} for i, mb in enumerate(free)]
    return Node(
        name,
        f"http://{name}",
        healthy=fields.pop("healthy", True),
        discovery=Discovery.model_validate(facts),
        health=Health.model_validate({"devices": readings}) if free else None,
        models={model: ModelInfo(id=model) for model in models},
        read_at=0.0 if free else None,
        **fields,
    )


def catalogue(**sizes: int | dict[str, Any]) -> Catalogue:
    """Models by id: their size in MB, or all of their profile."""
    profiles = [{"id": name} | (spec if isinstance(spec, dict) else {"vram_mb": spec}) for name, spec in sizes.items()]
    return Catalogue.model_validate({"models": profiles})


KNOWN = catalogue(A=20000, B=20000, C=5000, S={"vram_mb": 20000, "residency_priority": 300})
FAST = EvictionSection(min_residency_secs=0, swap_wait_secs=10)


def situation(*nodes: Node, known: Catalogue = KNOWN, settings: EvictionSection = FAST, **fields: Any) -> FleetSnapshot:
    in_view = ("in_flight", "loading", "draining", "loaded_at", "used_at")
    view = FleetView(nodes, **{name: fields.pop(name) for name in in_view if name in fields})
    return FleetSnapshot(view, known, NOW, settings=settings, **fields)


def victims(one: FleetSnapshot, node: Node, profile: Profile, since: float) -> list[str]:
    """What would be unloaded now."""
    found = clearing(one, node, profile, since)
    return [resident.model for resident in found.evict] if found and found.ready_at <= one.now else []


def test_a_free_node_comes_before_one_where_something_has_to_leave() -> None:
    decision = place(situation(node("a", "A", gpus=[48000], free=[19000]), node("b")), "B")
    assert isinstance(decision, Cold) and (decision.node, decision.evict) == ("b", ())


def test_the_cheapest_eviction_decides_between_nodes_that_are_full() -> None:
    used = {("a", "A"): NOW - 100, ("b", "B"): NOW - 900}
    full = situation(node("a", "A"), node("b", "B"), known=catalogue(A=20000, B=20000, N=20000), used_at=used)
    decision = place(full, "N")
    assert isinstance(decision, Cold) and (decision.node, decision.evict) == ("b", ("B",))
    slow = replace(
        full, load_secs={("b", "B"): 900.0, ("a", "A"): 10.0}
    )  # but what is slow to come back had better stay
    decision = place(slow, "N")
    assert isinstance(decision, Cold) and (decision.node, decision.evict) == ("a", ("A",))


def test_what_was_never_used_leaves_first_and_only_as_much_as_needed() -> None:
    known = catalogue(X=8000, Y=8000, Z=8000, N=7000)
    one = node("a", "X", "Y", "Z")
    times = {("a", "X"): NOW - 50, ("a", "Y"): NOW - 500}
    profile = known.profile("N")
    assert profile is not None
    assert victims(situation(one, known=known, used_at=times), one, profile, NOW) == ["Z"]
    times["a", "Z"] = NOW - 10
    assert victims(situation(one, known=known, used_at=times), one, profile, NOW) == ["Y"]


def test_small_ones_that_did_not_help_stay() -> None:
    known = catalogue(small=2000, large=20000, N=20000)
    one = node("a", "small", "large")
    profile = known.profile("N")
    assert profile is not None
    times = {("a", "small"): NOW - 900, ("a", "large"): NOW - 500}
    assert victims(situation(one, known=known, used_at=times), one, profile, NOW) == ["large"]


def test_the_priority_strategy_looks_at_the_class_first() -> None:
    known = catalogue(
        low={"vram_mb": 12000, "residency_priority": 50}, high={"vram_mb": 12000, "residency_priority": 90}, N=12000
    )
    one, times = node("a", "low", "high"), {("a", "low"): NOW - 100, ("a", "high"): NOW - 900}
    profile = known.profile("N")
    assert profile is not None
    by_class = FAST.model_copy(update={"strategy": "priority"})
    assert victims(situation(one, known=known, used_at=times), one, profile, NOW) == ["high"]
    assert victims(situation(one, known=known, used_at=times, settings=by_class), one, profile, NOW) == ["low"]


def test_equal_ranks_displace_one_another_and_a_lower_one_displaces_nothing() -> None:
    for resident, incoming in (("A", "B"), ("B", "A"), ("A", "S")):
        decision = place(situation(node("a", resident)), incoming)
        assert isinstance(decision, Cold) and decision.evict == (resident,)
    with pytest.raises(ApiError) as caught:
        place(situation(node("a", "S")), "A")
    assert (caught.value.status, caught.value.retry_after) == (503, 30)


def test_what_is_in_flight_stays_until_the_other_has_waited_long() -> None:
    busy = situation(node("a", "A"), in_flight={("a", "A"): 1})
    held = place(busy, "B", since=NOW - 4)
    assert held == Hold("B", "a", ("A",), NOW + 6)
    assert isinstance(place(busy, "B", since=NOW - 10), Cold)
    others = situation(node("a", "A", others={"A": 1}))
    assert isinstance(place(others, "B", since=NOW), Hold)


def test_what_came_just_now_stays_whoever_waits() -> None:
    settings = EvictionSection(min_residency_secs=30, swap_wait_secs=10)
    young = situation(node("a", "A"), settings=settings, loaded_at={("a", "A"): NOW - 5})
    assert place(young, "B", since=NOW - 500) == Hold("B", "a", ("A",), NOW + 25)


def test_those_who_waited_for_a_model_have_a_moment_to_ask_it() -> None:
    back = situation(node("a", "A"), awaited={("a", "A"): NOW - 0.25})  # it was there long before, out of reach
    assert place(back, "B", since=NOW - 500) == Hold("B", "a", ("A",), NOW + 0.75)
    forgetful = EvictionSection(idle_ttl_secs=60)
    assert expired(replace(back, settings=forgetful)) == []
    assert expired(replace(back, settings=forgetful, awaited={})) == [("a", "A")]


def test_a_batch_is_over_when_it_paused_for_half_of_a_reload() -> None:
    resting = situation(node("a", "A"), used_at={("a", "A"): NOW - 4}, load_secs={("a", "A"): 10.0})
    assert place(resting, "B", since=NOW) == Hold("B", "a", ("A",), NOW + 1)
    assert isinstance(place(replace(resting, now=NOW + 1), "B", since=NOW), Cold)


def test_a_model_on_its_way_out_has_to_be_gone_before_it_comes_back() -> None:
    leaving = situation(node("a", "A", gpus=[48000]), draining=frozenset({("a", "A")}))  # with room for it twice
    assert place(leaving, "A", since=NOW - 500) == Hold("A", "a", (), inf)


def test_what_came_for_somebody_was_not_never_used() -> None:
    came = situation(node("a", "A"), loaded_at={("a", "A"): NOW - 2}, load_secs={("a", "A"): 10.0})
    assert place(came, "B", since=NOW) == Hold("B", "a", ("A",), NOW + 3)


def test_memory_that_a_load_has_reserved_is_not_given_away() -> None:
    running = situation(node("a"), loading=frozenset({("a", "A")}), reserved={"a": {0: 20000}})
    assert place(running, "B", since=NOW - 500) == Hold("B", "a", ("A",), inf)


def test_a_claimed_node_is_left_to_whoever_claimed_it() -> None:
    two = situation(node("a"), node("b", gpus=[22000]))
    assert isinstance(place(two, "B", claimed={"a"}), Cold)
    assert isinstance(place(two, "B", claimed={"a", "b"}), Hold)


@pytest.mark.parametrize("fields", [{"cordoned": True}, {"kind": "openai"}])
def test_cordoned_nodes_and_servers_of_another_kind_load_nothing(fields: Any) -> None:
    decision = place(situation(node("a", **fields), node("b", "A")), "B")
    assert isinstance(decision, Cold) and decision.node == "b"
    with pytest.raises(ApiError):
        place(situation(node("a", **fields)), "B")


def test_each_model_goes_to_the_device_with_room_and_evicts_only_there() -> None:
    two = node("a", gpus=[24000, 24000], free=[4000, 21000])
    decision = place(situation(two), "A")
    assert isinstance(decision, Cold) and decision.spec.devices == [1]
    models = {"X": ModelInfo(id="X", devices=[0]), "Y": ModelInfo(id="Y", devices=[1])}
    full = replace(two, models=models, health=Health.model_validate(_readings(4000, 9000)))
    used = {("a", "X"): NOW - 900, ("a", "Y"): NOW - 100}
    known = catalogue(X=5000, Y=12000, N=20000)
    decision = place(situation(full, known=known, used_at=used), "N")
    assert isinstance(decision, Cold) and (decision.evict, decision.spec.devices) == (("Y",), [1])


def test_a_model_that_is_spread_needs_room_on_each_device() -> None:
    known = catalogue(wide={"vram_mb": 30000, "min_devices": 2})
    assert isinstance(place(situation(node("a", gpus=[24000, 24000], free=[16000, 15000]), known=known), "wide"), Cold)
    narrow = replace(node("a", gpus=[24000, 24000], free=[23000, 9000]), models={"C": ModelInfo(id="C", devices=[0])})
    with pytest.raises(ApiError, match="it needs 30000 MB on 2 devices"):
        place(situation(narrow, known=known), "wide")


def test_an_estimate_beyond_an_empty_node_is_tried_but_only_where_nothing_fits() -> None:
    small, large = node("a", gpus=[10000], free=[9000]), node("b", "B", gpus=[24000], free=[2000])
    decision = place(situation(small), "A")
    assert isinstance(decision, Cold) and decision.node == "a"
    busy = situation(small, large, in_flight={("b", "B"): 1})
    assert isinstance(place(busy, "A", since=NOW), Hold)


def test_a_node_without_accelerators_counts_its_memory_and_what_its_models_hold() -> None:
    known = catalogue(A=10000, B=10000)
    assert isinstance(place(situation(node("a", gpus=[]), known=known), "A"), Cold)
    decision = place(situation(node("a", "A", gpus=[]), known=known), "B")
    assert isinstance(decision, Cold) and decision.evict == ("A",) and decision.spec.devices is None


def test_a_model_of_unknown_size_needs_what_it_was_last_seen_to_hold() -> None:
    known, history = catalogue(A=20000, N={}), History()
    blind = situation(node("a", "A"), known=known, sizes_mb=history.sizes_mb)
    assert isinstance(decision := place(blind, "N"), Cold) and decision.evict == ()
    history.look(FleetView((replace(node("b"), models={"N": ModelInfo(id="N", vram_used_mb=9000)}),)))
    assert isinstance(decision := place(blind, "N"), Cold) and decision.evict == ("A",)


def test_a_node_whose_load_failed_is_left_out_for_a_while() -> None:
    failure = Failure("out of memory", temporary=True, times=1, retry_at=NOW + 3.2)
    failing = situation(node("a"), node("b"), failures={("a", "A"): failure})
    decision = place(failing, "A")
    assert isinstance(decision, Cold) and decision.node == "b"
    alone = situation(node("a"), failures={("a", "A"): failure})
    with pytest.raises(ApiError, match="out of memory") as caught:
        place(alone, "A")
    assert caught.value.retry_after == 4
    assert isinstance(place(replace(alone, now=NOW + 4), "A"), Cold)


def test_a_failure_is_told_though_the_node_last_said_that_it_was_loading() -> None:
    failure = Failure("out of memory", temporary=True, times=1, retry_at=NOW + 3.2)
    behind = node("a")
    behind.models["A"] = ModelInfo(id="A", status="loading")
    with pytest.raises(ApiError, match="out of memory"):
        place(situation(behind, failures={("a", "A"): failure}), "A")
    decision = place(situation(behind, node("b"), failures={("a", "A"): failure}), "A")
    assert isinstance(decision, Cold) and decision.node == "b"


def test_the_back_off_grows_and_ends() -> None:
    history, pair = History(), ("a", "A")
    waits = [history.failed(pair, "no", 0.0, temporary=True).retry_at for _ in range(12)]
    assert waits[:4] == [5, 10, 20, 40] and waits[-1] == MAX_BACKOFF_SECS
    history.loaded(pair, 10.0)
    history.loaded(pair, 20.0)
    assert history.failed(pair, "no", 0.0, temporary=True).retry_at == 5
    assert history.load_secs == {pair: 15.0}


def test_what_is_idle_for_long_has_expired_but_not_what_is_pinned_busy_or_new() -> None:
    known = catalogue(A=1, B=1, C=1, D=1, P={"vram_mb": 1, "pinned_on": ["a"]})
    ttl = EvictionSection(idle_ttl_secs=60)
    used = {("a", "A"): NOW - 70, ("a", "B"): NOW - 70, ("a", "P"): NOW - 500}
    one = situation(
        node("a", "A", "B", "C", "D", "P", "nobody's"),
        known=known,
        settings=ttl,
        used_at=used,
        loaded_at={("a", "C"): NOW - 50},
        in_flight={("a", "B"): 1},
        began=NOW - 55,
    )
    assert expired(one) == []  # the gateway has not looked for so long yet
    assert expired(replace(one, began=0.0)) == [("a", "A"), ("a", "D")]
    assert expired(replace(one, began=0.0, settings=EvictionSection())) == []


def _readings(*free: int) -> dict[str, Any]:
    return {"devices": [{"index": i, "vram_used_mb": 0, "vram_free_mb": mb} for i, mb in enumerate(free)]}


def test_memory_is_reserved_until_a_reading_can_have_seen_it() -> None:
    book, one = MemoryBook(), node("a", free=[20000])

    def reads(free: int, at: float) -> int:
        book.turn(replace(one, health=Health.model_validate(_readings(free)), read_at=at))
        return book.expected_free().get("a", {}).get(0, -1)

    load = Change({0: 8000})
    book.begin(one, load)
    assert reads(20000, 1.0) == 12000
    assert reads(15000, 2.0) == 12000  # partly there: not counted twice
    assert reads(9000, 3.0) == 9000  # somebody else takes memory too
    load.ended_at = 4.0
    assert reads(12000, 4.0 + READING_LAG_SECS / 2) == 12000
    assert reads(12000, 4.0 + READING_LAG_SECS) == -1
    failed = Change({0: 8000})
    book.begin(one, failed)
    book.cancel("a", failed)
    assert book.expected_free() == {}


def test_what_victims_hold_is_nobodys_until_they_are_gone() -> None:
    assert beyond({0: 8000}, [{0: 5000}, {0: 2000}]) == {0: 1000}
    assert beyond({0: 8000}, [{0: 20000}]) == {0: 0}
    book, one = MemoryBook(), node("a", free=[1000])
    book.begin(one, Change(beyond({0: 8000}, [{0: 20000}])))
    assert book.expected_free() == {"a": {0: 1000}}


@dataclass(frozen=True)
class Queued:
    model: str
    since: float
    priority: int = 0


def _order(*wanted: Queued, now: FleetSnapshot) -> list[str]:
    return [verdict.wanted.model for verdict in decide(wanted, lambda: now, lambda one, cold: None)]


def test_turns_go_by_priority_then_age_but_who_waited_too_long_comes_first() -> None:
    now = situation(node("a", gpus=[96000]))
    assert _order(Queued("A", NOW - 1), Queued("B", NOW - 2), Queued("C", NOW - 3, 5), now=now) == ["C", "B", "A"]
    assert _order(Queued("A", NOW - 11), Queued("B", NOW - 12), Queued("C", NOW - 3, 5), now=now) == ["B", "A", "C"]


def test_a_large_model_that_waits_is_not_overtaken_for_ever_by_small_ones() -> None:
    settings = EvictionSection(min_residency_secs=30, swap_wait_secs=10)
    young = situation(node("a", "B", gpus=[26000]), settings=settings, loaded_at={("a", "B"): NOW - 1})
    started: list[str] = []
    wanted = [Queued("A", NOW - 11), Queued("C", NOW - 1)]  # C would fit beside B
    outcomes = decide(wanted, lambda: young, lambda one, cold: started.append(one.model))
    assert started == [] and all(isinstance(one.decision, Hold) for one in outcomes)
    decide([Queued("A", NOW - 9), Queued("C", NOW - 1)], lambda: young, lambda one, cold: started.append(one.model))
    assert started == ["C"]


sizes = st.integers(0, 30000)
ids = st.sampled_from(["m0", "m1", "m2", "m3", "m4"])
times = st.one_of(st.none(), st.floats(0, NOW))


@st.composite
def situations(draw: st.DrawFn) -> FleetSnapshot:
    profiles = {
        f"m{i}": {"vram_mb": draw(sizes), "residency_priority": draw(st.sampled_from([50, 100, 300]))} for i in range(5)
    }
    nodes = [
        node(name, *draw(st.sets(ids)), gpus=[draw(st.integers(8000, 48000))], cordoned=draw(st.booleans()))
        for name in ("a", "b", "c")
    ]
    pairs = [(one.name, model) for one in nodes for model in one.models]

    def some(values: st.SearchStrategy[Any]) -> dict[tuple[str, str], Any]:
        return {pair: value for pair in pairs if (value := draw(values)) is not None}

    return situation(
        *nodes,
        known=catalogue(**profiles),
        settings=EvictionSection(
            min_residency_secs=draw(st.floats(0, 60)),
            swap_wait_secs=draw(st.floats(0, 60)),
            strategy=draw(st.sampled_from(["lru", "priority"])),
        ),
        in_flight=some(st.integers(0, 2)),
        loaded_at=some(times),
        used_at=some(times),
        load_secs=some(st.one_of(st.none(), st.floats(0.1, 300))),
    )


@given(situations(), ids, st.floats(0, NOW))
def test_every_decision_keeps_the_rules(one: FleetSnapshot, model: str, since: float) -> None:
    """What leaves may leave, no less and no more than needed; and nothing is ever placed where it cannot fit."""
    wanted = not any(model in node.models for node in one.view.nodes)
    if not wanted:
        return
    try:
        decision = place(one, model, since)
    except ApiError as error:
        assert error.status == 503
        return
    target = next(node for node in one.view.nodes if node.name == decision.node)
    profile = one.catalogue.profile(model)
    assert not target.cordoned and profile is not None
    if isinstance(decision, Hold):
        assert decision.until > NOW and decision.evict
        return
    there = {resident.model: resident for resident in one.residents(target)}
    overdue = NOW - since >= one.settings.swap_wait_secs
    for name in decision.evict:
        resident = there[name]
        assert resident.rank <= one.rank(model)
        assert not resident.busy or overdue
        assert resident.loaded_at is None or NOW - resident.loaded_at >= one.settings.min_residency_secs - 1e-6
    need, free = profile.vram_mb or 0, one.free(target)[0]
    gained = [there[name].megabytes[0] for name in decision.evict]
    assert free + sum(gained) >= need or not there
    if gained:
        assert free + sum(gained) - min(gained) < need


def test_an_explanation_says_in_words_what_each_node_would_do() -> None:
    nodes = [
        node("beast", "X", gpus=[9000], free=[2300]),
        node("down", healthy=False),
        node("shut", cordoned=True),
        node("tiny", gpus=[4000]),
        node("old", "S", gpus=[24000], free=[1000]),
    ]
    known = catalogue(
        N={"vram_mb": 6500, "min_device_vram_mb": 8000}, X=6000, S={"vram_mb": 20000, "residency_priority": 300}
    )
    told = explain(situation(*nodes, known=known, used_at={("beast", "X"): NOW - 300}), "N")
    assert (told["decision"], told["node"], told["evict"]) == ("load", "beast", ["X"])
    assert told["reason"] == "X leaves, then it loads"
    assert {one["node"]: one["verdict"] for one in told["candidates"]} == {
        "beast": "needs 6500 MB, 2300 free, could evict X (idle 300 s)",
        "down": "down",
        "shut": "cordoned",
        "tiny": "can never hold it: needs 1 device of 8000 MB",
        "old": "needs 6500 MB, 1000 free, and what is there may not leave: S ranks higher",
    }


def test_an_explanation_of_a_warm_a_waiting_and_an_unknown_model() -> None:
    busy = situation(node("a", "A"), in_flight={("a", "A"): 2})
    warm = explain(busy, "A")
    assert (warm["decision"], warm["node"], warm["reason"]) == ("warm", "a", "warm: a has 2 in flight")
    waiting = explain(busy, "B")
    assert (waiting["decision"], waiting["evict"]) == ("wait", ["A"])
    assert waiting["reason"] == "waits until A can leave, for 10 s at the most"
    assert waiting["candidates"][0]["verdict"] == "needs 20000 MB, 4000 free, could evict A (in use) in 10 s"
    unknown = explain(busy, "nobody")
    assert (unknown["decision"], unknown["node"]) == ("refuse", None)
    assert "not found" in unknown["reason"]
