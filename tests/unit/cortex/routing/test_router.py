"""Routing and placement decisions as pure functions of a fleet view."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.fake_node import FakeNode
from cortex.running_gateway import running_cortex
from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError
from helexa.core.node_reports import Discovery, Health, ModelInfo, ModelLoad
from helexa.cortex.config import RoutingSection
from helexa.cortex.fleet.breaker import ANY
from helexa.cortex.fleet.ejection import ANYONE, Requester
from helexa.cortex.fleet.fleet import FleetView, Node
from helexa.cortex.forwarding.retry import may_retry
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.placement import ColdPlacement, DelayedPlacement, place
from helexa.cortex.routing import WarmRoute, affinity_key, breaker_error, prefix_name, rank_nodes, route

CPU = Discovery(hostname="cpu", os="Linux", memory_total_mb=16000)


def gpus(*totals_mb: int) -> Discovery:
    devices = [{"index": i, "name": "GPU", "vram_total_mb": mb} for i, mb in enumerate(totals_mb)]
    return Discovery.model_validate({"hostname": "gpu", "os": "Linux", "devices": devices})


def node(name: str, *models: ModelInfo, healthy: bool = True, discovery: Discovery | None = CPU, **fields: Any) -> Node:
    by_id = {info.id: info for info in models}
    return Node(name, f"http://{name}", polled=True, healthy=healthy, discovery=discovery, models=by_id, **fields)


def info(status: Any = "loaded", **fields: Any) -> ModelInfo:
    return ModelInfo.model_validate({"id": "M", "status": status} | fields)


def view(*nodes: Node, **fields: Any) -> FleetView:
    return FleetView(nodes, **fields)


def catalog(**profile: Any) -> Catalog:
    return Catalog.model_validate({"models": [{"id": "M"} | profile], "aliases": {"m": "M"}})


EMPTY = Catalog()


def decide(
    fleet_view: FleetView, known: Catalog, name: str, choose: Any = random.choice
) -> WarmRoute | ColdPlacement | DelayedPlacement:
    """Route or place a request for model `name`, as the gateway does."""
    model = known.resolve(name)
    error = breaker_error(fleet_view, model)
    target = route(fleet_view, model, choose=choose)
    if target is None and error is not None:
        raise error
    return target or place(FleetSnapshot(fleet_view, known), model)


def rejection(fleet_view: FleetView, known: Catalog = EMPTY, name: str = "M") -> tuple[int, str | None, int | None]:
    with pytest.raises(ApiError) as caught:
        decide(fleet_view, known, name)
    return caught.value.status, caught.value.code, caught.value.retry_after


def node_and_url(decision: WarmRoute | ColdPlacement | DelayedPlacement | None) -> tuple[str, str]:
    assert isinstance(decision, WarmRoute) and decision.model == "M"
    return decision.node, decision.url


def first(nodes: Sequence[Node]) -> Node:
    return nodes[0]


def test_least_busy_warm_node_is_chosen() -> None:
    fleet_view = view(
        node("a", info(), other_requests={"M": 1}),
        node("b", info(), other_requests={"M": 1}),
        node("c", info()),
        in_flight={("a", "M"): 1, ("c", "M"): 1, ("b", "Other"): 9},
    )
    assert node_and_url(decide(fleet_view, EMPTY, "M", first)) == ("b", "http://b")


def test_tie_break_function_selects_among_the_least_busy_nodes() -> None:
    candidates: list[list[str]] = []

    def last(nodes: Sequence[Node]) -> Node:
        candidates.append([candidate.name for candidate in nodes])
        return nodes[-1]

    fleet_view = view(node("a", info()), node("b", info()), node("c", info(), other_requests={"M": 1}))
    assert node_and_url(decide(fleet_view, EMPTY, "M", last)) == ("b", "http://b")
    assert candidates == [["a", "b"]]


def test_request_is_sent_to_the_model_url_that_the_node_reported() -> None:
    assert node_and_url(decide(view(node("a", info(), urls={"M": "http://a:9"})), EMPTY, "M")) == ("a", "http://a:9")


def test_model_with_status_reloading_counts_as_warm() -> None:
    assert isinstance(decide(view(node("a", info("reloading"))), catalog(), "m"), WarmRoute)


def test_retry_of_a_request_does_not_choose_nodes_that_already_failed() -> None:
    fleet_view = view(node("a", info()), node("b", info(), other_requests={"M": 5}), node("c", info(), healthy=False))
    assert node_and_url(route(fleet_view, "M", avoid={"a"})) == ("b", "http://b")
    assert route(fleet_view, "M", avoid={"a", "b"}) is None


def test_node_on_which_the_model_is_unservable_is_not_chosen() -> None:
    broken = info(servable={"ok": False, "reason": "insufficient_vram"})
    assert node_and_url(decide(view(node("a", broken), node("b", info())), EMPTY, "M")) == ("b", "http://b")
    assert rejection(view(node("a", broken)), catalog()) == (503, "service_unavailable", 5)
    cold = decide(view(node("a", broken), node("b")), catalog(), "M")
    assert isinstance(cold, ColdPlacement) and cold.node == "b"


def test_request_without_any_healthy_node_is_a_retryable_503() -> None:
    assert rejection(view(node("a", info(), healthy=False))) == (503, "service_unavailable", 5)
    assert rejection(view(), name="nobody") == (503, "service_unavailable", 5)


def test_unknown_model_is_404() -> None:
    assert rejection(view(node("a", info())), catalog(), "nobody") == (404, "model_not_found", None)


@pytest.mark.parametrize("status", ["recovering", "poisoned"])
def test_model_that_recovers_or_is_quarantined_is_not_placed_on_another_node(status: str) -> None:
    assert rejection(view(node("a", info(status)), node("b")), catalog()) == (503, "service_unavailable", 2)


def test_model_on_a_node_that_is_down_is_a_retryable_503() -> None:
    fleet_view = view(node("a", info(), healthy=False), node("b"))
    assert rejection(fleet_view) == (503, "service_unavailable", 3)


def test_request_waits_for_a_running_load_of_its_model() -> None:
    cold = decide(view(node("a"), node("b"), loading=frozenset({("b", "M")})), catalog(), "M")
    assert isinstance(cold, ColdPlacement) and cold.node == "b"


@pytest.mark.parametrize("activation", [{"in_progress": "M"}, {"pending": ["M"]}])
def test_request_waits_for_a_model_of_a_starting_node_only_if_in_the_catalog(activation: Any) -> None:
    health = Health.model_validate({"activation": {"state": "pre_warming"} | activation})
    fleet_view = view(node("a"), node("b", health=health))
    cold = decide(fleet_view, catalog(), "M")
    assert isinstance(cold, ColdPlacement) and cold.node == "b"
    assert rejection(fleet_view) == (503, "service_unavailable", 5)


def test_unloaded_model_is_loaded_again_on_the_node_that_reports_it() -> None:
    cold = decide(view(node("a"), node("b", info("unloaded", harness="torch"))), EMPTY, "M")
    assert isinstance(cold, ColdPlacement) and (cold.node, cold.spec.model_id) == ("b", "M")


def test_load_request_has_the_settings_of_the_catalog() -> None:
    known = catalog(
        id="Org/M", quant="q6k", tool_parser="glm", source="huggingface", min_devices=2, min_device_vram_mb=20000
    )
    cold = decide(view(node("a", discovery=gpus(12000, 24000, 24000, 24000))), known, "Org/M")
    assert isinstance(cold, ColdPlacement)
    assert cold.spec.json_dict() == {
        "model_id": "Org/M",
        "harness": "torch",
        "source": "huggingface:Org/M",
        "quant": "q6k",
        "tensor_parallel": 2,
        "devices": [1, 2],
        "tool_parser": "glm",
    }


def test_node_without_accelerators_loads_a_model_that_needs_no_minimum_of_devices() -> None:
    cold = decide(view(node("a")), catalog(source="pypi:some-model"), "M")
    assert isinstance(cold, ColdPlacement)
    assert cold.spec.json_dict() == {"model_id": "M", "harness": "torch", "source": "pypi:some-model"}


@pytest.mark.parametrize(
    "requirements",
    [{"min_devices": 2}, {"min_device_vram_mb": 30000}, {"pinned_on": ["z"]}, {"min_devices": 2, "pinned_on": ["a"]}],
)
def test_model_that_no_node_can_hold_is_503_without_retry_after(requirements: Any) -> None:
    fleet_view = view(node("a", discovery=gpus(24000)), node("b"))
    assert rejection(fleet_view, catalog(**requirements)) == (503, "service_unavailable", None)


@pytest.mark.parametrize("node_fields", [{"discovery": gpus(48000), "healthy": False}, {"discovery": None}])
def test_model_that_a_node_may_hold_later_is_a_retryable_503(node_fields: Any) -> None:
    fleet_view = view(node("a"), node("b", **node_fields))
    assert rejection(fleet_view, catalog(min_device_vram_mb=30000)) == (503, "service_unavailable", 3)


def test_cold_model_is_placed_where_it_fits_then_by_free_memory_then_by_node_name() -> None:
    def with_free(name: str, *free_mb: int) -> Node:
        devices = [{"index": i, "vram_used_mb": 0, "vram_free_mb": mb} for i, mb in enumerate(free_mb)]
        health = Health.model_validate({"devices": devices})
        return node(name, discovery=gpus(*(24000 for _ in free_mb)), health=health)

    def chosen(*nodes: Node, **profile: Any) -> str:
        decision = decide(view(*nodes), catalog(**profile), "M")
        assert isinstance(decision, ColdPlacement)
        return decision.node

    assert chosen(with_free("a", 4000), with_free("b", 9000)) == "b"
    assert chosen(with_free("b", 9000), with_free("a", 9000)) == "a"
    assert chosen(with_free("a", 9000, 9000), with_free("b", 12000), vram_mb=10000) == "b"
    assert chosen(with_free("a", 9000, 9000), with_free("b", 12000, 1000), vram_mb=15000, min_devices=2) == "a"
    assert chosen(with_free("a", 4000), node("cpu"), vram_mb=10000) == "cpu"
    assert chosen(with_free("a", 20000), node("cpu"), vram_mb=10000) == "a"


KEY = b"k" * 16


def routed(fleet_view: FleetView, **options: Any) -> WarmRoute:
    target = route(fleet_view, "M", **options)
    assert target is not None
    return target


def test_session_stays_on_its_node_until_the_node_is_overloaded() -> None:
    names = ["a", "b", "c"]
    order = rank_nodes(names, "M", KEY)

    def chosen(**loads: int) -> tuple[str, str]:
        fleet_view = view(*(node(name, info()) for name in names), in_flight={(n, "M"): k for n, k in loads.items()})
        target = routed(fleet_view, key=KEY)
        return target.node, target.reason.split("; ")[1]

    assert chosen() == (order[0], "why=affinity")
    assert chosen(**{order[0]: 1}) == (order[0], "why=affinity")
    assert chosen(**{order[0]: 2}) == (order[1], "why=overflow")
    assert chosen(**{order[0]: 8, order[1]: 8}) == (order[2], "why=overflow")
    assert chosen(**{order[0]: 5, order[1]: 4, order[2]: 4}) == (order[0], "why=affinity")


def test_node_with_the_prompt_cached_is_preferred_unless_overloaded_memory_before_disk() -> None:
    order = rank_nodes(["a", "b", "c"], "M", KEY)
    name = frozenset({prefix_name(KEY)})
    caches = dict(zip(order, ({}, {"disk_prefixes": name}, {"memory_prefixes": name}), strict=True))

    def chosen(**loads: int) -> tuple[str, str]:
        nodes = (node(n, info(), health=Health(models=[ModelLoad(id="M", **cache)])) for n, cache in caches.items())
        target = routed(view(*nodes, in_flight={(n, "M"): k for n, k in loads.items()}), key=KEY)
        return target.node, target.reason.split("; ")[1]

    assert chosen() == (order[2], "why=memory")
    assert chosen(**{order[2]: 2}) == (order[1], "why=disk")
    assert chosen(**{order[2]: 9, order[1]: 9}) == (order[0], "why=affinity")
    assert routed(view(*(node(n, info()) for n in order)), key=b"o" * 16).reason.split("; ")[1] == "why=affinity"


def test_disabled_affinity_chooses_the_least_busy_node() -> None:
    last = rank_nodes(["a", "b"], "M", KEY)[1]
    fleet_view = view(*(node(name, info(), other_requests={"M": name != last}) for name in ("a", "b")))
    assert routed(fleet_view, key=KEY, settings=RoutingSection(affinity=False)).node == last


def test_many_concurrent_requests_with_one_affinity_key_spread_over_nodes() -> None:
    in_flight: dict[tuple[str, str], int] = {}
    fleet_view = view(*(node(name, info()) for name in "abcd"), in_flight=in_flight)
    for _ in range(100):
        name = routed(fleet_view, key=KEY).node
        in_flight[name, "M"] = in_flight.get((name, "M"), 0) + 1
    assert max(in_flight.values()) <= 1.25 * 25 + 2
    assert len(in_flight) == 4


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("draining", ("a", "M")),
        ("open", ("a", "M", ANY)),
        ("cooling_down", ("a", "M")),
        ("ejected", (("a", "M"), ANYONE)),
    ],
)
def test_draining_failing_or_busy_node_is_not_chosen(field: str, key: Any) -> None:
    fields: Any = {field: frozenset({key})}
    fleet_view = view(node("a", info()), node("b", info(), other_requests={"M": 9}), **fields)
    assert routed(fleet_view).node == routed(fleet_view, key=KEY).node == "b"
    only_target = route(view(node("a", info()), **fields), "M")
    assert (only_target is not None) is (field in ("cooling_down", "ejected"))


def test_cordoned_node_gets_no_requests() -> None:
    assert routed(view(node("a", info(), cordoned=True), node("b", info(), other_requests={"M": 9}))).node == "b"
    assert route(view(node("a", info(), cordoned=True)), "M") is None


def test_model_on_a_failing_node_is_503_and_not_loaded_elsewhere() -> None:
    fleet_view = view(node("a", info()), node("b"), open=frozenset({("a", "M", ANY)}))
    assert rejection(fleet_view, catalog()) == (503, "service_unavailable", 3)


def test_reason_of_a_routing_decision_is_a_valid_header_value() -> None:
    fleet_view = view(node("a", info(), other_requests={"M": 2}), node("b", info(), other_requests={"M": 3}))
    assert routed(fleet_view).reason == "node=a; why=least-busy; load=2; candidates=2"
    odd = routed(view(node("é\r\nx: y;" * 50, info()))).reason
    assert odd.isascii() and odd.isprintable() and odd.count(";") == 3 and len(odd) < 120
    assert "why=only" in odd


@pytest.mark.parametrize(
    ("outcomes", "may"),
    [
        (["unreached"], True),
        (["unreached"] * 4, True),
        (["broken"], True),
        (["busy", "broken"], True),
        (["broken", "broken"], False),
        (["broken", "unreached"], True),
        (["broken", "unreached", "broken"], False),
        (["busy", "busy"], True),
        (["declined"] * 4, True),
        (["failed"], True),
        (["failed", "declined"], True),
        (["failed", "failed"], False),
        (["broken", "failed"], False),
        (["silent"], False),
        (["unreached", "silent"], False),
    ],
)
def test_retry_is_not_allowed_after_two_failed_nodes_or_one_silent_node(outcomes: Any, may: bool) -> None:
    assert may_retry(outcomes) is may


NAMES = ["a", "b", "c", "d", "e"]
CLIENT = Requester("client", "/chat")
names = st.sampled_from(NAMES)
pairs = st.frozensets(st.tuples(names, st.just("M")))


@st.composite
def fleet_views(draw: st.DrawFn) -> FleetView:
    nodes = []
    for name in NAMES:
        status = draw(st.sampled_from([None, "loaded", "loaded", "reloading", "loading", "recovering", "unloaded"]))
        servable = draw(st.sampled_from([None, {"ok": True}, {"ok": False}]))
        models = [] if status is None else [info(status, servable=servable)]
        load = draw(st.integers(0, 9))
        healthy, cordoned = draw(st.booleans()), draw(st.booleans())
        nodes.append(node(name, *models, healthy=healthy, cordoned=cordoned, other_requests={"M": load}))
    requesters = st.sampled_from(
        [CLIENT, Requester(ANY, "/chat"), Requester("other", "/chat"), Requester("client", "/else")]
    )
    return view(
        *nodes,
        open=draw(st.frozensets(st.tuples(names, st.just("M"), st.sampled_from([ANY, "client", "other"])))),
        draining=draw(pairs),
        cooling_down=draw(pairs),
        ejected=draw(st.frozensets(st.tuples(st.tuples(names, st.just("M")), requesters))),
    )


@given(fleet_views(), st.none() | st.binary(min_size=16, max_size=16), st.sets(st.sampled_from(NAMES)))
def test_routing_of_random_fleets_chooses_only_allowed_nodes_within_the_load_bound(
    fleet_view: FleetView, key: bytes | None, avoid: set[str]
) -> None:
    able: dict[str, int] = {}
    for candidate in fleet_view.nodes:
        model = candidate.models.get("M")
        pair = (candidate.name, "M")
        rejecting = pair in fleet_view.draining or fleet_view.open & {(*pair, ANY), (*pair, "client")}
        barred = not candidate.healthy or candidate.cordoned or candidate.name in avoid or rejecting
        servable = model is not None and (model.servable is None or model.servable.ok)
        if model is not None and model.status in ("loaded", "reloading") and servable and not barred:
            able[candidate.name] = candidate.other_requests["M"]
    ejected = {name for (name, _), requester in fleet_view.ejected if requester in (CLIENT, Requester(ANY, "/chat"))}
    trusted = {name: load for name, load in able.items() if name not in ejected}
    calm = (
        {name: load for name, load in trusted.items() if (name, "M") not in fleet_view.cooling_down} or trusted or able
    )
    target = route(fleet_view, "M", key=key, avoid=avoid, requester=CLIENT)
    assert (target is None) == (not able)
    if target is not None:
        bound = 1.25 * sum(calm.values()) / len(calm) + 1 if key else min(calm.values())
        assert calm[target.node] <= bound


async def test_sessions_stay_on_their_node_and_spread_over_nodes() -> None:
    text = "You are a careful assistant. " * 60
    async with (
        FakeNode("a").holds("Org/M").serving() as a,
        FakeNode("b").holds("Org/M").serving() as b,
        running_cortex(a, b) as cortex,
    ):

        async def ask(*turns: str) -> str:
            messages = [{"role": "user", "content": turn} for turn in (text + turns[0], *turns[1:])]
            body = {"model": "Org/M", "messages": messages}
            async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
                return response.headers["x-helexa-route"]

        for session in range(12):
            routes = {await ask(f"session {session}"), await ask(f"session {session}", "and then?", "why?")}
            assert len(routes) == 1 and "why=affinity; load=0; candidates=2" in routes.pop()
    assert len(a.bodies) + len(b.bodies) == 24
    assert a.bodies and b.bodies


def test_routing_by_affinity_reuses_caches_without_overloading_a_node() -> None:
    """Simulate 40 conversations with one system prompt on 5 nodes, each with one turn at a time."""

    def simulate(affinity: bool) -> tuple[float, float]:
        rng, in_flight = random.Random(4), dict.fromkeys([(name, "M") for name in NAMES], 0)
        fleet_view = view(*(node(name, info()) for name in NAMES), in_flight=in_flight)
        home: dict[int, str] = {}
        running: list[tuple[int, str]] = []
        reused = turns = 0
        peak = 0.0
        for _ in range(4000):
            if len(running) < 20:
                conversation = rng.randrange(40)
                key = affinity_key(b'{"prompt":"' + b"s" * 1500 + b'%d"}' % conversation) if affinity else None
                name = routed(fleet_view, key=key, choose=rng.choice).node
                reused, turns = reused + (home.get(conversation) == name), turns + 1
                home[conversation] = name
                in_flight[name, "M"] += 1
                running.append((conversation, name))
            else:
                _, name = running.pop(rng.randrange(len(running)))
                in_flight[name, "M"] -= 1
            if len(running) >= 19:
                peak = max(peak, max(in_flight.values()) / (len(running) / len(NAMES)))
        return reused / turns, peak

    reuse_ratio, peak_load = simulate(affinity=True)
    reuse_ratio_without_affinity, _ = simulate(affinity=False)
    assert reuse_ratio > 0.6 > 0.3 > reuse_ratio_without_affinity
    assert peak_load < 1.25 + 2 / 4
