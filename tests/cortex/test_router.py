"""Where requests go: decisions as pure functions of a picture."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.fake_node import FakeNode
from cortex.running import running_cortex
from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError
from helexa.core.fleet import Discovery, Health, ModelInfo
from helexa.cortex.config import RoutingSection
from helexa.cortex.fleet.fleet import FleetView, Node
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.placement import Cold, Hold, place
from helexa.cortex.routing.affinity import affinity_key, ranked
from helexa.cortex.routing.router import Warm, failing, may_retry, route

CPU = Discovery(hostname="cpu", os="Linux", memory_total_mb=16000)


def gpus(*totals_mb: int) -> Discovery:
    devices = [{"index": i, "name": "GPU", "vram_total_mb": mb} for i, mb in enumerate(totals_mb)]
    return Discovery.model_validate({"hostname": "gpu", "os": "Linux", "devices": devices})


def node(name: str, *models: ModelInfo, healthy: bool = True, discovery: Discovery | None = CPU, **fields: Any) -> Node:
    by_id = {info.id: info for info in models}
    return Node(name, f"http://{name}", healthy=healthy, discovery=discovery, models=by_id, **fields)


def info(status: Any = "loaded", **fields: Any) -> ModelInfo:
    return ModelInfo.model_validate({"id": "M", "status": status} | fields)


def view(*nodes: Node, **fields: Any) -> FleetView:
    return FleetView(nodes, **fields)


def catalogue(**profile: Any) -> Catalogue:
    return Catalogue.model_validate({"models": [{"id": "M"} | profile], "aliases": {"m": "M"}})


EMPTY = Catalogue()


def decide(picture: FleetView, known: Catalogue, name: str, choose: Any = random.choice) -> Warm | Cold | Hold:
    """What becomes of a request, as the gateway decides it."""
    model = known.resolve(name)
    refused = failing(picture, model)
    target = route(picture, model, choose=choose)
    if target is None and refused is not None:
        raise refused
    return target or place(FleetSnapshot(picture, known), model)


def refusal(picture: FleetView, known: Catalogue = EMPTY, name: str = "M") -> tuple[int, str | None, int | None]:
    with pytest.raises(ApiError) as caught:
        decide(picture, known, name)
    return caught.value.status, caught.value.code, caught.value.retry_after


def where(decision: Warm | Cold | Hold | None) -> tuple[str, str]:
    assert isinstance(decision, Warm) and decision.model == "M"
    return decision.node, decision.url


def first(nodes: Sequence[Node]) -> Node:
    return nodes[0]


def test_the_least_busy_warm_node_answers() -> None:
    picture = view(
        node("a", info(), others={"M": 1}),
        node("b", info(), others={"M": 1}),
        node("c", info()),
        in_flight={("a", "M"): 1, ("c", "M"): 1, ("b", "Other"): 9},
    )
    assert where(decide(picture, EMPTY, "M", first)) == ("b", "http://b")


def test_ties_are_broken_by_the_choice_given_among_the_least_busy_only() -> None:
    offered: list[list[str]] = []

    def last(nodes: Sequence[Node]) -> Node:
        offered.append([one.name for one in nodes])
        return nodes[-1]

    picture = view(node("a", info()), node("b", info()), node("c", info(), others={"M": 1}))
    assert where(decide(picture, EMPTY, "M", last)) == ("b", "http://b")
    assert offered == [["a", "b"]]


def test_the_url_that_the_node_gave_is_used() -> None:
    assert where(decide(view(node("a", info(), urls={"M": "http://a:9"})), EMPTY, "M")) == ("a", "http://a:9")


def test_a_reloading_model_is_warm_and_an_alias_is_resolved() -> None:
    assert isinstance(decide(view(node("a", info("reloading"))), catalogue(), "m"), Warm)


def test_another_warm_node_leaves_out_those_to_avoid() -> None:
    picture = view(node("a", info()), node("b", info(), others={"M": 5}), node("c", info(), healthy=False))
    assert where(route(picture, "M", avoid={"a"})) == ("b", "http://b")
    assert route(picture, "M", avoid={"a", "b"}) is None


def test_an_unservable_model_is_skipped_for_another_node() -> None:
    broken = info(servable={"ok": False, "reason": "insufficient_vram"})
    assert where(decide(view(node("a", broken), node("b", info())), EMPTY, "M")) == ("b", "http://b")
    assert refusal(view(node("a", broken)), catalogue()) == (503, "service_unavailable", 5)
    cold = decide(view(node("a", broken), node("b")), catalogue(), "M")
    assert isinstance(cold, Cold) and cold.node == "b"


def test_without_a_healthy_node_every_model_is_refused_for_now() -> None:
    assert refusal(view(node("a", info(), healthy=False))) == (503, "service_unavailable", 5)
    assert refusal(view(), name="nobody") == (503, "service_unavailable", 5)


def test_an_unknown_model_is_a_404() -> None:
    assert refusal(view(node("a", info())), catalogue(), "nobody") == (404, "model_not_found", None)


@pytest.mark.parametrize("status", ["recovering", "poisoned"])
def test_a_recovering_model_is_never_placed_elsewhere(status: str) -> None:
    assert refusal(view(node("a", info(status)), node("b")), catalogue()) == (503, "service_unavailable", 2)


def test_a_model_only_on_a_node_that_is_down_is_refused_for_now() -> None:
    picture = view(node("a", info(), healthy=False), node("b"))
    assert refusal(picture) == (503, "service_unavailable", 3)


def test_a_load_that_runs_is_joined_where_it_runs() -> None:
    cold = decide(view(node("a"), node("b"), loading=frozenset({("b", "M")})), catalogue(), "M")
    assert isinstance(cold, Cold) and cold.node == "b"


@pytest.mark.parametrize("activation", [{"in_progress": "M"}, {"pending": ["M"]}])
def test_a_model_that_a_node_activates_is_joined_when_catalogued_and_else_refused_for_now(activation: Any) -> None:
    health = Health.model_validate({"activation": {"state": "pre_warming"} | activation})
    picture = view(node("a"), node("b", health=health))
    cold = decide(picture, catalogue(), "M")
    assert isinstance(cold, Cold) and cold.node == "b"
    assert refusal(picture) == (503, "service_unavailable", 5)


def test_a_model_that_a_node_lists_as_unloaded_is_loaded_there() -> None:
    cold = decide(view(node("a"), node("b", info("unloaded", harness="torch"))), EMPTY, "M")
    assert isinstance(cold, Cold) and (cold.node, cold.spec.model_id) == ("b", "M")


def test_the_load_spec_says_what_the_catalogue_says() -> None:
    known = catalogue(
        id="Org/M", quant="q6k", tool_parser="glm", source="huggingface", min_devices=2, min_device_vram_mb=20000
    )
    cold = decide(view(node("a", discovery=gpus(12000, 24000, 24000, 24000))), known, "Org/M")
    assert isinstance(cold, Cold)
    assert cold.spec.json_dict() == {
        "model_id": "Org/M",
        "harness": "torch",
        "source": "huggingface:Org/M",
        "quant": "q6k",
        "tensor_parallel": 2,
        "devices": [1, 2],
        "tool_parser": "glm",
    }


def test_a_node_without_accelerators_takes_what_states_no_floor() -> None:
    cold = decide(view(node("a")), catalogue(source="pypi:some-model"), "M")
    assert isinstance(cold, Cold)
    assert cold.spec.json_dict() == {"model_id": "M", "harness": "torch", "source": "pypi:some-model"}


@pytest.mark.parametrize(
    "needs",
    [{"min_devices": 2}, {"min_device_vram_mb": 30000}, {"pinned_on": ["z"]}, {"min_devices": 2, "pinned_on": ["a"]}],
)
def test_a_model_that_no_node_can_ever_hold_is_refused_without_a_retry(needs: Any) -> None:
    picture = view(node("a", discovery=gpus(24000)), node("b"))
    assert refusal(picture, catalogue(**needs)) == (503, "service_unavailable", None)


@pytest.mark.parametrize("later", [{"discovery": gpus(48000), "healthy": False}, {"discovery": None}])
def test_a_model_that_a_node_could_hold_later_is_refused_for_now(later: Any) -> None:
    picture = view(node("a"), node("b", **later))
    assert refusal(picture, catalogue(min_device_vram_mb=30000)) == (503, "service_unavailable", 3)


def test_a_cold_model_goes_where_there_is_room_then_where_most_is_free_then_by_name() -> None:
    def with_free(name: str, *free_mb: int) -> Node:
        devices = [{"index": i, "vram_used_mb": 0, "vram_free_mb": mb} for i, mb in enumerate(free_mb)]
        health = Health.model_validate({"devices": devices})
        return node(name, discovery=gpus(*(24000 for _ in free_mb)), health=health)

    def chosen(*nodes: Node, **profile: Any) -> str:
        decision = decide(view(*nodes), catalogue(**profile), "M")
        assert isinstance(decision, Cold)
        return decision.node

    assert chosen(with_free("a", 4000), with_free("b", 9000)) == "b"
    assert chosen(with_free("b", 9000), with_free("a", 9000)) == "a"
    assert chosen(with_free("a", 9000, 9000), with_free("b", 12000), vram_mb=10000) == "b"
    assert chosen(with_free("a", 9000, 9000), with_free("b", 12000, 1000), vram_mb=15000, min_devices=2) == "a"
    assert chosen(with_free("a", 4000), node("cpu"), vram_mb=10000) == "cpu"
    assert chosen(with_free("a", 20000), node("cpu"), vram_mb=10000) == "a"


KEY = b"k" * 16


def routed(picture: FleetView, **options: Any) -> Warm:
    target = route(picture, "M", **options)
    assert target is not None
    return target


def test_a_session_stays_on_its_node_until_that_is_too_busy() -> None:
    names = ["a", "b", "c"]
    order = ranked(names, "M", KEY)

    def chosen(**loads: int) -> tuple[str, str]:
        picture = view(*(node(name, info()) for name in names), in_flight={(n, "M"): k for n, k in loads.items()})
        target = routed(picture, key=KEY)
        return target.node, target.reason.split("; ")[1]

    assert chosen() == (order[0], "why=affinity")
    assert chosen(**{order[0]: 1}) == (order[0], "why=affinity")
    assert chosen(**{order[0]: 2}) == (order[1], "why=overflow")
    assert chosen(**{order[0]: 8, order[1]: 8}) == (order[2], "why=overflow")
    assert chosen(**{order[0]: 5, order[1]: 4, order[2]: 4}) == (order[0], "why=affinity")


def test_affinity_can_be_switched_off() -> None:
    last = ranked(["a", "b"], "M", KEY)[1]
    picture = view(*(node(name, info(), others={"M": name != last}) for name in ("a", "b")))
    assert routed(picture, key=KEY, settings=RoutingSection(affinity=False)).node == last


def test_one_hot_key_does_not_fill_one_node() -> None:
    in_flight: dict[tuple[str, str], int] = {}
    picture = view(*(node(name, info()) for name in "abcd"), in_flight=in_flight)
    for _ in range(100):
        name = routed(picture, key=KEY).node
        in_flight[name, "M"] = in_flight.get((name, "M"), 0) + 1
    assert max(in_flight.values()) <= 1.25 * 25 + 2
    assert len(in_flight) == 4


@pytest.mark.parametrize("field", ["draining", "open", "wary"])
def test_a_node_that_drains_fails_or_is_busy_is_passed_over_however_idle(field: str) -> None:
    fields = {field: frozenset({("a", "M")})}
    picture = view(node("a", info()), node("b", info(), others={"M": 9}), **fields)
    assert routed(picture).node == routed(picture, key=KEY).node == "b"
    alone = route(view(node("a", info()), **fields), "M")
    assert (alone is not None) is (field == "wary")


def test_a_cordoned_node_takes_nothing() -> None:
    assert routed(view(node("a", info(), cordoned=True), node("b", info(), others={"M": 9}))).node == "b"
    assert route(view(node("a", info(), cordoned=True)), "M") is None


def test_a_model_whose_only_node_keeps_failing_is_refused_for_now_and_not_loaded_elsewhere() -> None:
    picture = view(node("a", info()), node("b"), open=frozenset({("a", "M")}))
    assert refusal(picture, catalogue()) == (503, "service_unavailable", 3)


def test_the_reason_is_fit_for_a_header() -> None:
    picture = view(node("a", info(), others={"M": 2}), node("b", info(), others={"M": 3}))
    assert routed(picture).reason == "node=a; why=least-busy; load=2; candidates=2"
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
        (["silent"], False),
        (["unreached", "silent"], False),
    ],
)
def test_what_may_be_asked_of_another_node(outcomes: Any, may: bool) -> None:
    assert may_retry(outcomes) is may


NAMES = ["a", "b", "c", "d", "e"]
pairs = st.frozensets(st.sampled_from([(name, "M") for name in NAMES]))


@st.composite
def pictures(draw: st.DrawFn) -> FleetView:
    nodes = []
    for name in NAMES:
        status = draw(st.sampled_from([None, "loaded", "loaded", "reloading", "loading", "recovering", "unloaded"]))
        servable = draw(st.sampled_from([None, {"ok": True}, {"ok": False}]))
        models = [] if status is None else [info(status, servable=servable)]
        load = draw(st.integers(0, 9))
        healthy, cordoned = draw(st.booleans()), draw(st.booleans())
        nodes.append(node(name, *models, healthy=healthy, cordoned=cordoned, others={"M": load}))
    return view(*nodes, open=draw(pairs), draining=draw(pairs), wary=draw(pairs))


@given(pictures(), st.none() | st.binary(min_size=16, max_size=16), st.sets(st.sampled_from(NAMES)))
def test_nothing_that_is_not_allowed_is_ever_chosen_and_the_bound_on_load_holds(
    picture: FleetView, key: bytes | None, avoid: set[str]
) -> None:
    able: dict[str, int] = {}
    for one in picture.nodes:
        held = one.models.get("M")
        pair = (one.name, "M")
        barred = not one.healthy or one.cordoned or one.name in avoid or pair in picture.open | picture.draining
        servable = held is not None and (held.servable is None or held.servable.ok)
        if held is not None and held.status in ("loaded", "reloading") and servable and not barred:
            able[one.name] = one.others["M"]
    calm = {name: load for name, load in able.items() if (name, "M") not in picture.wary} or able
    target = route(picture, "M", key=key, avoid=avoid)
    assert (target is None) == (not able)
    if target is not None:
        bound = 1.25 * sum(calm.values()) / len(calm) + 1 if key else min(calm.values())
        assert calm[target.node] <= bound


async def test_sessions_stay_where_they_began_and_spread_over_the_nodes() -> None:
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


def test_conversations_meet_their_cache_again_and_no_node_is_crowded_for_it() -> None:
    """40 conversations at once on 5 nodes, under one system prompt: each turn runs for a while, then comes the next."""

    def simulate(affinity: bool) -> tuple[float, float]:
        chance, in_flight = random.Random(4), dict.fromkeys([(name, "M") for name in NAMES], 0)
        picture = view(*(node(name, info()) for name in NAMES), in_flight=in_flight)
        home: dict[int, str] = {}
        running: list[tuple[int, str]] = []
        again = turns = 0
        peak = 0.0
        for _ in range(4000):
            if len(running) < 20:
                talk = chance.randrange(40)
                key = affinity_key(b'{"prompt":"' + b"s" * 1500 + b'%d"}' % talk) if affinity else None
                name = routed(picture, key=key, choose=chance.choice).node
                again, turns = again + (home.get(talk) == name), turns + 1
                home[talk] = name
                in_flight[name, "M"] += 1
                running.append((talk, name))
            else:
                _, name = running.pop(chance.randrange(len(running)))
                in_flight[name, "M"] -= 1
            if len(running) >= 19:
                peak = max(peak, max(in_flight.values()) / (len(running) / len(NAMES)))
        return again / turns, peak

    found, crowded = simulate(affinity=True)
    without, _ = simulate(affinity=False)
    assert found > 0.6 > 0.3 > without
    assert crowded < 1.25 + 2 / 4
