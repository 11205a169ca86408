"""Placement and eviction decisions as pure functions of a fleet snapshot."""

from collections.abc import Sequence, Set
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.catalog import Catalog, Profile
from helexa.core.display import memory_text
from helexa.core.errors import ApiError
from helexa.core.node_reports import Discovery, Health, LocalModel, LocalModels, ModelInfo, ModelLoad
from helexa.cortex.config import EvictionSection
from helexa.cortex.fleet.fleet_view import FleetView, LocalIndex, Node
from helexa.cortex.lifecycle.evictor import expired_models, plan_eviction
from helexa.cortex.lifecycle.explain import explain
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.load_history import MAX_BACKOFF_SECS, Failure, LoadHistory
from helexa.cortex.lifecycle.load_queue import QueuedModel as Queued
from helexa.cortex.lifecycle.load_queue import decide
from helexa.cortex.lifecycle.memory import READING_LAG_SECS, MemoryChange, MemoryEstimator, additional_mb
from helexa.cortex.lifecycle.placement import ColdPlacement, DelayedPlacement, place

NOW = 1000.0


def node(name: str, *models: str, gpus: Sequence[int] = (24000,), free: Sequence[int] = (), **fields: Any) -> Node:
    """Return a healthy node with `models`. Without `free`, the node does not report its free memory."""
    devices = [{"index": i, "name": "GPU", "vram_total_mb": mb} for i, mb in enumerate(gpus)]
    facts = {"hostname": name, "os": "Linux", "memory_total_mb": 16000, "devices": devices}
    readings = [{"index": i, "vram_used_mb": 0, "vram_free_mb": mb} for i, mb in enumerate(free)]
    return Node(
        name,
        f"http://{name}",
        polled=True,
        healthy=fields.pop("healthy", True),
        discovery=Discovery.model_validate(facts),
        health=Health.model_validate({"devices": readings}) if free else None,
        models={model: ModelInfo(id=model) for model in models},
        read_at=0.0 if free else None,
        **fields,
    )


def with_ranks(node: Node, ranks: int, kinds: str = "") -> Node:
    """Return the node with `max_tensor_parallel`, and with one letter per device as the device's name."""
    assert node.discovery is not None
    named = zip(node.discovery.devices, kinds, strict=True)
    devices = [device.model_copy(update={"name": kind}) for device, kind in named]
    update = {"max_tensor_parallel": ranks, "devices": devices}
    return replace(node, discovery=node.discovery.model_copy(update=update))


def catalog(**sizes: int | dict[str, Any]) -> Catalog:
    """Return a catalog from model ids with their size in MB or their whole profile."""
    profiles = [{"id": name} | (spec if isinstance(spec, dict) else {"vram_mb": spec}) for name, spec in sizes.items()]
    return Catalog.model_validate({"models": profiles})


KNOWN = catalog(A=20000, B=20000, C=5000, S={"vram_mb": 20000, "residency_priority": 300})
FAST = EvictionSection(min_residency_secs=0, swap_wait_secs=10)


def snapshot_of(*nodes: Node, known: Catalog = KNOWN, settings: EvictionSection = FAST, **fields: Any) -> FleetSnapshot:
    in_view = ("in_flight", "loading", "draining", "loaded_at", "used_at")
    view = FleetView(nodes, **{name: fields.pop(name) for name in in_view if name in fields})
    return FleetSnapshot(view, known, NOW, settings=settings, **fields)


def victims(snapshot: FleetSnapshot, node: Node, profile: Profile, since: float) -> list[str]:
    """Return the models that `plan_eviction` would evict now for `profile`; empty if it would wait."""
    plan = plan_eviction(snapshot, node, profile, since)
    return [resident.model for resident in plan.evict] if plan and plan.ready_at <= snapshot.now else []


def test_cold_model_is_placed_on_a_node_with_free_memory_rather_than_evict_another() -> None:
    decision = place(snapshot_of(node("a", "A", gpus=[48000], free=[19000]), node("b")), "B")
    assert isinstance(decision, ColdPlacement) and (decision.node, decision.evict) == ("b", ())


def test_model_is_placed_on_the_full_node_whose_eviction_is_cheapest() -> None:
    used = {("a", "A"): NOW - 100, ("b", "B"): NOW - 900}
    full = snapshot_of(node("a", "A"), node("b", "B"), known=catalog(A=20000, B=20000, N=20000), used_at=used)
    decision = place(full, "N")
    assert isinstance(decision, ColdPlacement) and (decision.node, decision.evict) == ("b", ("B",))
    slow = replace(full, load_secs={("b", "B"): 900.0, ("a", "A"): 10.0})  # a slow reload makes an eviction expensive
    decision = place(slow, "N")
    assert isinstance(decision, ColdPlacement) and (decision.node, decision.evict) == ("a", ("A",))


def test_model_that_was_never_used_is_evicted_first() -> None:
    known = catalog(X=8000, Y=8000, Z=8000, N=7000)
    host = node("a", "X", "Y", "Z")
    times = {("a", "X"): NOW - 50, ("a", "Y"): NOW - 500}
    profile = known.profile("N")
    assert profile is not None
    assert victims(snapshot_of(host, known=known, used_at=times), host, profile, NOW) == ["Z"]
    times["a", "Z"] = NOW - 10
    assert victims(snapshot_of(host, known=known, used_at=times), host, profile, NOW) == ["Y"]


def test_smaller_models_are_not_evicted_if_a_larger_one_suffices() -> None:
    known = catalog(small=2000, large=20000, N=20000)
    host = node("a", "small", "large")
    profile = known.profile("N")
    assert profile is not None
    times = {("a", "small"): NOW - 900, ("a", "large"): NOW - 500}
    assert victims(snapshot_of(host, known=known, used_at=times), host, profile, NOW) == ["large"]


def test_priority_strategy_evicts_by_residency_priority() -> None:
    known = catalog(
        low={"vram_mb": 12000, "residency_priority": 50}, high={"vram_mb": 12000, "residency_priority": 90}, N=12000
    )
    host, times = node("a", "low", "high"), {("a", "low"): NOW - 100, ("a", "high"): NOW - 900}
    profile = known.profile("N")
    assert profile is not None
    by_class = FAST.model_copy(update={"strategy": "priority"})
    assert victims(snapshot_of(host, known=known, used_at=times), host, profile, NOW) == ["high"]
    assert victims(snapshot_of(host, known=known, used_at=times, settings=by_class), host, profile, NOW) == ["low"]


def test_cold_model_evicts_only_models_of_equal_or_lower_residency_priority() -> None:
    for resident, incoming in (("A", "B"), ("B", "A"), ("A", "S")):
        decision = place(snapshot_of(node("a", resident)), incoming)
        assert isinstance(decision, ColdPlacement) and decision.evict == (resident,)
    with pytest.raises(ApiError) as caught:
        place(snapshot_of(node("a", "S")), "A")
    assert (caught.value.status, caught.value.retry_after) == (503, 30)


def test_busy_model_is_not_evicted_until_swap_wait_has_passed() -> None:
    busy = snapshot_of(node("a", "A"), in_flight={("a", "A"): 1})
    delayed = place(busy, "B", since=NOW - 4)
    assert delayed == DelayedPlacement("B", "a", ("A",), NOW + 6)
    assert isinstance(place(busy, "B", since=NOW - 10), ColdPlacement)
    other_requests = snapshot_of(node("a", "A", other_requests={"A": 1}))
    assert isinstance(place(other_requests, "B", since=NOW), DelayedPlacement)


def test_newly_loaded_model_is_not_evicted_before_min_residency() -> None:
    settings = EvictionSection(min_residency_secs=30, swap_wait_secs=10)
    young = snapshot_of(node("a", "A"), settings=settings, loaded_at={("a", "A"): NOW - 5})
    assert place(young, "B", since=NOW - 500) == DelayedPlacement("B", "a", ("A",), NOW + 25)


def test_model_on_a_node_that_just_came_back_is_not_evicted_immediately() -> None:
    back = snapshot_of(node("a", "A"), awaited={("a", "A"): NOW - 0.25})  # loaded long before, but unreachable
    assert place(back, "B", since=NOW - 500) == DelayedPlacement("B", "a", ("A",), NOW + 0.75)
    forgetful = EvictionSection(idle_ttl_secs=60)
    assert expired_models(replace(back, settings=forgetful)) == []
    assert expired_models(replace(back, settings=forgetful, awaited={})) == [("a", "A")]


def test_model_can_be_evicted_if_unused_for_half_of_its_load_time() -> None:
    resting = snapshot_of(node("a", "A"), used_at={("a", "A"): NOW - 4}, load_secs={("a", "A"): 10.0})
    assert place(resting, "B", since=NOW) == DelayedPlacement("B", "a", ("A",), NOW + 1)
    assert isinstance(place(replace(resting, now=NOW + 1), "B", since=NOW), ColdPlacement)


def test_draining_model_is_not_loaded_again_before_its_unload() -> None:
    # with memory for two copies
    leaving = snapshot_of(node("a", "A", gpus=[48000]), draining=frozenset({("a", "A")}))
    assert place(leaving, "A", since=NOW - 500) == DelayedPlacement("A", "a", (), inf)


def test_freshly_loaded_model_counts_as_recently_used() -> None:
    came = snapshot_of(node("a", "A"), loaded_at={("a", "A"): NOW - 2}, load_secs={("a", "A"): 10.0})
    assert place(came, "B", since=NOW) == DelayedPlacement("B", "a", ("A",), NOW + 3)


def test_memory_reserved_by_a_running_load_is_not_used_for_another_model() -> None:
    running = snapshot_of(node("a"), loading=frozenset({("a", "A")}), reserved={"a": {0: 20000}})
    assert place(running, "B", since=NOW - 500) == DelayedPlacement("B", "a", ("A",), inf)


def test_node_reserved_for_a_model_that_has_waited_longer_is_not_chosen() -> None:
    two = snapshot_of(node("a"), node("b", gpus=[22000]))
    assert isinstance(place(two, "B", claimed={"a"}), ColdPlacement)
    assert isinstance(place(two, "B", claimed={"a", "b"}), DelayedPlacement)


@pytest.mark.parametrize("fields", [{"cordoned": True}, {"kind": "openai"}])
def test_no_model_is_placed_on_cordoned_nodes_or_third_party_backends(fields: Any) -> None:
    decision = place(snapshot_of(node("a", **fields), node("b", "A")), "B")
    assert isinstance(decision, ColdPlacement) and decision.node == "b"
    with pytest.raises(ApiError):
        place(snapshot_of(node("a", **fields)), "B")


def test_model_for_one_device_evicts_only_models_of_that_device() -> None:
    two = node("a", gpus=[24000, 24000], free=[4000, 21000])
    decision = place(snapshot_of(two), "A")
    assert isinstance(decision, ColdPlacement) and decision.spec.devices == [1]
    models = {"X": ModelInfo(id="X", devices=[0]), "Y": ModelInfo(id="Y", devices=[1])}
    full = replace(two, models=models, health=Health.model_validate(_readings(4000, 9000)))
    used = {("a", "X"): NOW - 900, ("a", "Y"): NOW - 100}
    known = catalog(X=5000, Y=12000, N=20000)
    decision = place(snapshot_of(full, known=known, used_at=used), "N")
    assert isinstance(decision, ColdPlacement) and (decision.evict, decision.spec.devices) == (("Y",), [1])


def test_multi_device_model_is_placed_only_if_each_device_has_enough_memory() -> None:
    known = catalog(wide={"vram_mb": 30000, "min_devices": 2})
    assert isinstance(
        place(snapshot_of(node("a", gpus=[24000, 24000], free=[16000, 15000]), known=known), "wide"), ColdPlacement
    )
    narrow = replace(node("a", gpus=[24000, 24000], free=[23000, 9000]), models={"C": ModelInfo(id="C", devices=[0])})
    with pytest.raises(ApiError, match=r"the model needs 29\.3 GB on 2 devices"):
        place(snapshot_of(narrow, known=known), "wide")


def test_model_larger_than_every_node_is_tried_on_the_emptiest() -> None:
    small, large = node("a", gpus=[10000], free=[9000]), node("b", "B", gpus=[24000], free=[2000])
    decision = place(snapshot_of(small), "A")
    assert isinstance(decision, ColdPlacement) and decision.node == "a"
    busy = snapshot_of(small, large, in_flight={("b", "B"): 1})
    assert isinstance(place(busy, "A", since=NOW), DelayedPlacement)


def test_node_without_accelerators_uses_system_memory() -> None:
    known = catalog(A=10000, B=10000)
    assert isinstance(place(snapshot_of(node("a", gpus=[]), known=known), "A"), ColdPlacement)
    decision = place(snapshot_of(node("a", "A", gpus=[]), known=known), "B")
    assert isinstance(decision, ColdPlacement) and decision.evict == ("A",) and decision.spec.devices is None


def test_ranks_of_a_model_share_the_memory_of_a_node_without_accelerators() -> None:
    known = catalog(A=10000, wide={"vram_mb": 10000, "min_devices": 2})
    sockets = with_ranks(node("a", "A", gpus=[]), 2)
    snapshot = snapshot_of(sockets, known=known)
    decision = place(snapshot, "wide")
    assert isinstance(decision, ColdPlacement) and decision.evict == ("A",), "half of the model would fit"
    assert (decision.spec.tensor_parallel, decision.spec.devices) == (2, None)
    (candidate,) = explain(snapshot, "wide").candidates
    assert candidate.verdict == "needs 9.77 GB, 5.86 GB free, could evict A (never used)"


def test_model_with_more_ranks_than_a_node_allows_is_placed_elsewhere() -> None:
    known = catalog(wide={"min_devices": 2})
    one, two = with_ranks(node("a", gpus=[]), 1), with_ranks(node("b", gpus=[]), 2)
    snapshot = snapshot_of(one, two, known=known)
    decision = place(snapshot, "wide")
    assert isinstance(decision, ColdPlacement) and decision.node == "b"
    verdict, _ = explain(snapshot, "wide").candidates
    reason = "needs 2 devices; the node can divide a model among at most 1"
    assert verdict.verdict == f"cannot hold it: {reason}"
    with pytest.raises(ApiError, match=f"no node can hold model 'wide': it {reason}"):
        place(snapshot_of(one, known=known), "wide")


@pytest.mark.parametrize(
    ("kinds", "free", "chosen"),
    [
        ("ABAA", [20000, 47000, 16000, 15000], [0, 2]),
        ("AABB", [9000, 23000, 16000, 16000], [2, 3]),
        ("AABB", [19000, 18000, 16000, 16000], [0, 1]),
    ],
)
def test_model_with_two_ranks_is_placed_on_two_devices_of_one_kind(
    kinds: str, free: list[int], chosen: list[int]
) -> None:
    known = catalog(wide={"vram_mb": 30000, "min_devices": 2})
    devices = with_ranks(node("a", gpus=[48000] * 4, free=free), 2, kinds)
    decision = place(snapshot_of(devices, known=known), "wide")
    assert isinstance(decision, ColdPlacement) and decision.spec.devices == chosen


def test_size_of_a_model_without_vram_mb_is_the_size_last_reported_by_a_node() -> None:
    known, history = catalog(A=20000, N={}), LoadHistory()
    blind = snapshot_of(node("a", "A"), known=known, sizes_mb=history.sizes_mb)
    assert isinstance(decision := place(blind, "N"), ColdPlacement) and decision.evict == ()
    history.look(FleetView((replace(node("b"), models={"N": ModelInfo(id="N", vram_used_mb=9000)}),)))
    assert isinstance(decision := place(blind, "N"), ColdPlacement) and decision.evict == ("A",)


def test_node_with_a_failed_load_is_skipped_until_its_back_off_ends() -> None:
    failure = Failure("out of memory", temporary=True, times=1, retry_at=NOW + 3.2)
    failing = snapshot_of(node("a"), node("b"), failures={("a", "A"): failure})
    decision = place(failing, "A")
    assert isinstance(decision, ColdPlacement) and decision.node == "b"
    single_node = snapshot_of(node("a"), failures={("a", "A"): failure})
    with pytest.raises(ApiError, match="out of memory") as caught:
        place(single_node, "A")
    assert caught.value.retry_after == 4
    assert isinstance(place(replace(single_node, now=NOW + 4), "A"), ColdPlacement)


def test_known_load_failure_overrides_an_outdated_status_loading() -> None:
    failure = Failure("out of memory", temporary=True, times=1, retry_at=NOW + 3.2)
    outdated = replace(node("a"), models={"A": ModelInfo(id="A", status="loading")})
    with pytest.raises(ApiError, match="out of memory"):
        place(snapshot_of(outdated, failures={("a", "A"): failure}), "A")
    decision = place(snapshot_of(outdated, node("b"), failures={("a", "A"): failure}), "A")
    assert isinstance(decision, ColdPlacement) and decision.node == "b"


def test_back_off_after_failed_loads_grows_to_a_limit_and_resets_after_a_success() -> None:
    history, pair = LoadHistory(), ("a", "A")
    waits = [history.failed(pair, "no", 0.0, temporary=True).retry_at for _ in range(12)]
    assert waits[:4] == [5, 10, 20, 40] and waits[-1] == MAX_BACKOFF_SECS
    history.loaded(pair, 10.0)
    history.loaded(pair, 20.0)
    assert history.failed(pair, "no", 0.0, temporary=True).retry_at == 5
    assert history.load_secs == {pair: 15.0}


def test_models_are_due_for_unloading_after_the_idle_time_unless_pinned_busy_or_new() -> None:
    known = catalog(A=1, B=1, C=1, D=1, P={"vram_mb": 1, "pinned_on": ["a"]})
    ttl = EvictionSection(idle_ttl_secs=60)
    used = {("a", "A"): NOW - 70, ("a", "B"): NOW - 70, ("a", "P"): NOW - 500}
    idle = snapshot_of(
        node("a", "A", "B", "C", "D", "P", "nobody's"),
        known=known,
        settings=ttl,
        used_at=used,
        loaded_at={("a", "C"): NOW - 50},
        in_flight={("a", "B"): 1},
        began=NOW - 55,
    )
    assert expired_models(idle) == []  # the gateway has not run for this long
    assert expired_models(replace(idle, began=0.0)) == [("a", "A"), ("a", "D")]
    assert expired_models(replace(idle, began=0.0, settings=EvictionSection())) == []


def test_keep_alive_set_by_a_client_replaces_the_idle_time_of_a_model() -> None:
    known = catalog(A=1, B=1, C=1, P={"vram_mb": 1, "pinned_on": ["a"]})
    keep_secs = {"A": inf, "B": 5.0, "C": 0.0, "P": 0.0, "unknown": 0.0, "other": 5.0}
    idle = snapshot_of(
        node("a", "A", "B", "C", "P", "unknown", "other"),
        known=known,
        settings=EvictionSection(idle_ttl_secs=60),
        used_at=dict.fromkeys((("a", name) for name in keep_secs), NOW - 10),
        keep_secs=keep_secs,
    )
    assert expired_models(idle) == [("a", "B"), ("a", "C"), ("a", "unknown")]
    waiting = replace(idle, awaited={("a", "C"): NOW - 0.5})  # its requests may still be on their way to the node
    assert expired_models(waiting) == [("a", "B"), ("a", "unknown")]


def _readings(*free: int) -> dict[str, Any]:
    return {"devices": [{"index": i, "vram_used_mb": 0, "vram_free_mb": mb} for i, mb in enumerate(free)]}


def test_memory_reservation_of_a_load_ends_with_a_later_memory_reading() -> None:
    memory, host = MemoryEstimator(), node("a", free=[20000])

    def reads(free: int, at: float) -> int:
        memory.update(replace(host, health=Health.model_validate(_readings(free)), read_at=at))
        return memory.expected_free().get("a", {}).get(0, -1)

    load = MemoryChange({0: 8000})
    memory.begin(host, load)
    assert reads(20000, 1.0) == 12000
    assert reads(15000, 2.0) == 12000  # memory in use by the load is not counted twice
    assert reads(9000, 3.0) == 9000  # another process allocates memory too
    load.ended_at = 4.0
    assert reads(12000, 4.0 + READING_LAG_SECS / 2) == 12000
    assert reads(12000, 4.0 + READING_LAG_SECS) == -1
    failed = MemoryChange({0: 8000})
    memory.begin(host, failed)
    memory.cancel("a", failed)
    assert memory.expected_free() == {}


def test_memory_of_models_to_be_evicted_is_not_free_until_they_are_unloaded() -> None:
    assert additional_mb({0: 8000}, [{0: 5000}, {0: 2000}]) == {0: 1000}
    assert additional_mb({0: 8000}, [{0: 20000}]) == {0: 0}
    memory, host = MemoryEstimator(), node("a", free=[1000])
    memory.begin(host, MemoryChange(additional_mb({0: 8000}, [{0: 20000}])))
    assert memory.expected_free() == {"a": {0: 1000}}


def _order(*wanted: Queued, now: FleetSnapshot) -> list[str]:
    return [verdict.queued.model for verdict in decide(wanted, lambda: now, lambda queued, cold: None)]


def test_waiting_models_are_sorted_by_overdue_state_then_priority_then_age() -> None:
    now = snapshot_of(node("a", gpus=[96000]))
    assert _order(Queued("A", NOW - 1), Queued("B", NOW - 2), Queued("C", NOW - 3, 5), now=now) == [
        "C",
        "B",
        "A",
    ]
    assert _order(Queued("A", NOW - 11), Queued("B", NOW - 12), Queued("C", NOW - 3, 5), now=now) == [
        "B",
        "A",
        "C",
    ]


def test_waiting_large_model_is_not_starved_by_small_models() -> None:
    settings = EvictionSection(min_residency_secs=30, swap_wait_secs=10)
    young = snapshot_of(node("a", "B", gpus=[26000]), settings=settings, loaded_at={("a", "B"): NOW - 1})
    started: list[str] = []
    wanted = [Queued("A", NOW - 11), Queued("C", NOW - 1)]  # C would fit next to B
    outcomes = decide(wanted, lambda: young, lambda queued, cold: started.append(queued.model))
    assert started == [] and all(isinstance(verdict.decision, DelayedPlacement) for verdict in outcomes)
    decide(
        [Queued("A", NOW - 9), Queued("C", NOW - 1)],
        lambda: young,
        lambda queued, cold: started.append(queued.model),
    )
    assert started == ["C"]


sizes = st.integers(0, 30000)
ids = st.sampled_from(["m0", "m1", "m2", "m3", "m4"])
times = st.one_of(st.none(), st.floats(0, NOW))


@st.composite
def snapshots(draw: st.DrawFn) -> FleetSnapshot:
    profiles = {
        f"m{i}": {"vram_mb": draw(sizes), "residency_priority": draw(st.sampled_from([50, 100, 300]))} for i in range(5)
    }
    nodes = [
        node(name, *draw(st.sets(ids)), gpus=[draw(st.integers(8000, 48000))], cordoned=draw(st.booleans()))
        for name in ("a", "b", "c")
    ]
    pairs = [(candidate.name, model) for candidate in nodes for model in candidate.models]

    def some(values: st.SearchStrategy[Any]) -> dict[tuple[str, str], Any]:
        return {pair: value for pair in pairs if (value := draw(values)) is not None}

    return snapshot_of(
        *nodes,
        known=catalog(**profiles),
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


@given(snapshots(), ids, st.floats(0, NOW))
def test_random_placements_evict_only_evictable_models_and_as_few_as_needed(
    snapshot: FleetSnapshot, model: str, since: float
) -> None:
    """Every victim may be evicted, the victims are as few as needed, and the model fits afterwards."""
    wanted = not any(model in node.models for node in snapshot.view.nodes)
    if not wanted:
        return
    try:
        decision = place(snapshot, model, since)
    except ApiError as error:
        assert error.status == 503
        return
    target = next(node for node in snapshot.view.nodes if node.name == decision.node)
    profile = snapshot.catalog.profile(model)
    assert not target.cordoned and profile is not None
    if isinstance(decision, DelayedPlacement):
        assert decision.until > NOW and decision.evict
        return
    residents = {resident.model: resident for resident in snapshot.residents(target)}
    overdue = NOW - since >= snapshot.settings.swap_wait_secs
    for name in decision.evict:
        resident = residents[name]
        assert resident.rank <= snapshot.rank(model)
        assert not resident.busy or overdue
        assert resident.loaded_at is None or NOW - resident.loaded_at >= snapshot.settings.min_residency_secs - 1e-6
    need, free = profile.vram_mb or 0, snapshot.free(target)[0]
    gained = [residents[name].megabytes[0] for name in decision.evict]
    assert not need or free + sum(gained) >= need or not residents  # without a known need, every node fits
    if gained:
        assert free + sum(gained) - min(gained) < need


def test_placement_explanation_has_a_verdict_for_each_node() -> None:
    nodes = [
        node("beast", "X", gpus=[9000], free=[2300]),
        node("down", healthy=False),
        node("shut", cordoned=True),
        node("tiny", gpus=[4000]),
        node("old", "S", gpus=[24000], free=[1000]),
    ]
    known = catalog(
        N={"vram_mb": 6500, "min_device_vram_mb": 8000}, X=6000, S={"vram_mb": 20000, "residency_priority": 300}
    )
    explanation = explain(snapshot_of(*nodes, known=known, used_at={("beast", "X"): NOW - 300}), "N")
    assert (explanation.decision, explanation.node, explanation.evict) == ("load", "beast", ["X"])
    assert explanation.reason == "loads after unloading X"
    assert {entry.node: entry.verdict for entry in explanation.candidates} == {
        "beast": "needs 6.35 GB, 2.25 GB free, could evict X (idle 300 s)",
        "down": "down",
        "shut": "cordoned",
        "tiny": "cannot hold it: needs 1 device of 7.81 GB; the node has none",
        "old": "needs 6.35 GB, 1000 MB free, and its models cannot be evicted: S ranks higher",
    }


def test_placement_explanation_distinguishes_warm_waiting_and_unknown_models() -> None:
    busy = snapshot_of(node("a", "A"), in_flight={("a", "A"): 2})
    warm = explain(busy, "A")
    assert (warm.decision, warm.node, warm.reason) == ("warm", "a", "warm: a has 2 in flight")
    waiting = explain(busy, "B")
    assert (waiting.decision, waiting.evict) == ("wait", ["A"])
    assert waiting.reason == "waits until A can be unloaded, at most 10 s"
    assert waiting.candidates[0].verdict == "needs 19.5 GB, 3.91 GB free, could evict A (in use) in 10 s"
    unknown = explain(busy, "nobody")
    assert (unknown.decision, unknown.node) == ("refuse", None)
    assert "not found" in unknown.reason


def cpu_node(name: str, *models: str, free: int, grantable: int | None = None, machine: str | None = None) -> Node:
    """Return a node of 24,000 MB without accelerators, which reports its free memory."""
    bare = node(name, *models, gpus=())
    assert bare.discovery is not None
    report = {"memory_free_mb": free, "memory_total_mb": 24000, "grantable_mb": grantable}
    discovery = bare.discovery.model_copy(update={"machine": machine, "memory_total_mb": 24000})
    return replace(bare, discovery=discovery, health=Health.model_validate(report), read_at=0.0)


def on_disk(*nodes: Node, serves: bool = True, names: Sequence[str] = (), **sizes_mb: int | None) -> FleetView:
    """Return a view of `nodes`, which have models of these estimated sizes on their disks, with other `names`."""
    models = [
        LocalModel(id=model, source=f"huggingface:{model}", memory_mb=mb, names=list(names))
        for model, mb in sizes_mb.items()
    ]
    with_models = tuple(replace(node, local=LocalModels(models=models)) for node in nodes)
    return FleetView(with_models, local=LocalIndex({node.name: models for node in nodes}), serves_local=serves)


def test_model_larger_than_the_free_memory_of_each_empty_cpu_node_is_rejected() -> None:
    known = catalog(big={}, unknown={})
    snapshot = snapshot_of(cpu_node("a", free=11_264), known=known, estimates_mb={"big": 63_000})
    with pytest.raises(ApiError, match=r"the model needs 61\.5 GB; a has 11\.0 GB free") as refused:
        place(snapshot, "big")
    assert refused.value.retry_after is not None
    explanation = explain(snapshot, "big")
    assert explanation.decision == "refuse"
    unsure = explain(snapshot, "unknown")
    assert unsure.reason.startswith("loads if the node's memory suffices")
    assert unsure.candidates[0].verdict == "needs an unknown amount of memory, 11.0 GB free"


def test_model_estimated_slightly_above_the_free_memory_is_tried_on_an_empty_node() -> None:
    snapshot = snapshot_of(cpu_node("a", free=10_000), known=catalog(m={}), estimates_mb={"m": 11_000})
    assert isinstance(place(snapshot, "m"), ColdPlacement)


def test_model_without_a_catalog_size_is_placed_by_the_estimate_from_its_headers() -> None:
    view = on_disk(cpu_node("a", free=9000), cpu_node("b", free=20_000), M=15_000)
    snapshot = FleetSnapshot(view, Catalog(), NOW, settings=FAST)
    decision = place(snapshot, "M")
    assert isinstance(decision, ColdPlacement)
    assert (decision.node, decision.spec.source, decision.spec.download) == ("b", "huggingface:M", False)
    verdicts = {entry.node: entry.verdict for entry in explain(snapshot, "M").candidates}
    assert verdicts == {
        "a": "needs 14.6 GB, 8.79 GB free: too little, although the node is empty",
        "b": "needs 14.6 GB, 19.5 GB free",
    }


def test_memory_of_a_catalog_model_without_vram_mb_is_estimated_from_its_files() -> None:
    view = on_disk(cpu_node("a", free=9000), serves=False, M=15_000, names=["pypi:m"])
    known = catalog(renamed={"source": "pypi:m"}, stated={"source": "pypi:m", "vram_mb": 5000})
    snapshot = FleetSnapshot(view, known, NOW, settings=FAST)
    assert [snapshot.needs_mb(model) for model in ("renamed", "stated", "M")] == [15_000, 5000, 15_000]
    with pytest.raises(ApiError, match="not found"):
        place(snapshot, "M")  # this gateway serves only the catalog
    assert "local_models = true" in explain(snapshot, "M").candidates[0].verdict


def test_draft_model_on_a_disk_counts_in_the_estimate_of_its_model() -> None:
    view = on_disk(cpu_node("a", free=16_000), M=15_000, draft=2000)
    for draft, needs_mb in ((None, 15_000), ("draft", 17_000), ("gone", 15_000)):
        snapshot = FleetSnapshot(view, catalog(M={"draft_model": draft}), NOW, settings=FAST)
        assert snapshot.needs_mb("M") == needs_mb
        assert explain(snapshot, "M").candidates[0].verdict.startswith(f"needs {memory_text(needs_mb)}, 15.6 GB free")


def test_cold_model_is_placed_on_the_node_that_has_saved_the_prompt_of_the_waiting_request() -> None:
    history, prompt = LoadHistory(), frozenset({"00ff"})

    def saver(name: str, *models: str, memory: Set[str] = prompt, **fields: Any) -> Node:
        saved = ModelLoad(id="A", memory_prefixes=frozenset(memory), saved_prompts_mb=9)
        return replace(node(name, *models), health=Health(models=[saved]), **fields)

    def chosen(*nodes: Node, prompts: Set[str] = prompt) -> str:
        snapshot = snapshot_of(*nodes, saved_prompts=history.saved_prompts)
        queue = [Queued("A", NOW, prompts=frozenset(prompts))]
        (decided,) = decide(queue, lambda: snapshot, lambda _queued, _cold: None)
        assert isinstance(decided.decision, ColdPlacement)
        return decided.decision.node

    history.look(FleetView((node("a"), saver("b", "A"), saver("c", "A", memory={"other"}))))
    assert chosen(node("a"), node("b"), node("c")) == "b"  # although the model is unloaded there by now
    assert chosen(node("a"), node("b"), node("c"), prompts=frozenset()) == "a"
    sleeping = {"A": ModelInfo(id="A", status="sleeping")}
    assert chosen(replace(node("a"), models=sleeping), node("b")) == "b"
    assert chosen(replace(node("a"), models=sleeping), replace(node("b"), models=sleeping)) == "b"
    assert chosen(node("a"), node("b", "B", gpus=[24000])) == "a"  # no eviction for the prompt
    verdicts = explain(snapshot_of(node("a"), node("b"), saved_prompts=history.saved_prompts), "A").candidates
    assert ["saved beginnings of prompts: 1" in candidate.verdict for candidate in verdicts] == [False, True]
    history.look(FleetView((replace(node("b", "A"), health=Health(models=[ModelLoad(id="A")])),)))
    assert chosen(node("a"), node("b")) == "a"  # cleared


def test_saved_prompts_that_were_cleared_are_forgotten_until_the_nodes_next_report() -> None:
    history, pair = LoadHistory(), ("a", "A")

    def view() -> FleetView:
        load = ModelLoad(id="A", memory_prefixes=frozenset({"00ff"}), saved_prompts_mb=9)
        return FleetView((replace(node("a", "A"), health=Health(models=[load])),))

    before = view()
    history.forget_prompts(before, pair)
    history.look(before)  # the node does not report the model any more, which sleeps
    assert pair not in history.saved_prompts
    history.look(view())
    assert history.saved_prompts[pair] == {"00ff"}


def test_free_memory_of_a_cpu_node_is_at_most_what_the_node_reports_as_grantable() -> None:
    assert snapshot_of(cpu_node("a", free=11_000)).free(cpu_node("a", free=11_000)) == {-1: 11_000}
    promised = cpu_node("a", free=11_000, grantable=4000)
    assert snapshot_of(promised).free(promised) == {-1: 4000}


def test_free_memory_of_a_machine_with_two_nodes_is_counted_once() -> None:
    first = cpu_node("a", free=10_000, grantable=4000, machine="m1")
    second = cpu_node("b", free=10_000, grantable=10_000, machine="m1")
    elsewhere = cpu_node("c", free=10_000, grantable=10_000, machine="m2")
    snapshot = snapshot_of(first, second, elsewhere)
    assert [snapshot.free(node)[-1] for node in (first, second, elsewhere)] == [4000, 4000, 10_000]
    loading = snapshot_of(first, second, elsewhere, reserved={"b": {-1: 3000}})
    assert loading.free(first) == {-1: 1000}
