"""Models that sleep on nodes: placement, wake by a load request, evictions for a wake, listing."""

from dataclasses import replace

import pytest
from aiohttp import web

from cortex.fake_node import FakeNode, respond
from cortex.lifecycle.running_lifecycle import stage
from cortex.lifecycle.test_placement import FAST, KNOWN, catalog, node, snapshot_of
from cortex.running_gateway import eventually, running_cortex
from helexa.core.catalog import Catalog, Profile
from helexa.core.node_reports import ModelInfo, ModelStatus
from helexa.cortex.api.listings import model_list
from helexa.cortex.config import NeuronSection
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import Node, Report
from helexa.cortex.lifecycle.evictor import expired_models
from helexa.cortex.lifecycle.explain import explain
from helexa.cortex.lifecycle.placement import ColdPlacement, load_spec, place

NOTHING = Catalog()


def asleep(one: Node, *models: str) -> Node:
    return replace(one, models={**one.models, **{model: ModelInfo(id=model, status="sleeping") for model in models}})


def placed(*nodes: Node, model: str = "A", known: Catalog = KNOWN) -> ColdPlacement:
    decision = place(snapshot_of(*nodes, known=known), model, since=0.0)
    assert isinstance(decision, ColdPlacement)
    return decision


def test_memory_of_a_sleeping_model_counts_as_free_and_the_model_is_not_evicted() -> None:
    snapshot = snapshot_of(asleep(node("a"), "A"))
    assert snapshot.residents(snapshot.view.nodes[0]) == [] and snapshot.free(snapshot.view.nodes[0]) == {0: 24000}
    assert placed(asleep(node("a"), "A"), model="B").evict == ()
    ttl = FAST.model_copy(update={"idle_ttl_secs": 1.0})
    assert expired_models(snapshot_of(asleep(node("a"), "A"), settings=ttl)) == []


def test_sleeping_model_wakes_on_its_node_if_its_memory_is_free() -> None:
    empty, sleeper = node("a", free=[24000]), asleep(node("b", free=[23000]), "A")
    assert placed(empty, sleeper).node == "b"
    full = asleep(node("b", "B", free=[3000]), "A")
    assert placed(empty, full).node == "a"
    assert (placed(full).node, placed(full).evict) == ("b", ("B",))


def test_sleeping_model_that_is_not_in_the_catalog_wakes_only_on_its_node() -> None:
    empty, sleeper = node("a", free=[24000]), asleep(node("b", free=[23000]), "own")
    assert placed(empty, sleeper, model="own", known=NOTHING).node == "b"
    full = asleep(node("b", "B", free=[3000]), "own")
    snapshot = snapshot_of(full, sizes_mb={"own": 20000})
    decision = place(snapshot, "own", since=0.0)
    assert isinstance(decision, ColdPlacement) and decision.evict == ("B",)


def test_sleeping_model_does_not_evict_a_model_of_higher_residency_priority() -> None:
    full = asleep(node("a", "S", free=[3000]), "A")
    assert explain(snapshot_of(full), "A").decision == "refuse"


def test_load_request_lets_a_pinned_model_sleep_only_after_an_idle_time_in_the_catalog() -> None:
    idle_secs = {"A": None, "P": 0.0, "Q": 60.0}
    known = catalog(A={}, P={"pinned_on": ["a"]}, Q={"pinned_on": ["a"], "idle_unload_secs": 60})
    assert {profile.id: load_spec(profile, ()).idle_unload_secs for profile in known.models} == idle_secs
    assert load_spec(Profile(id="R", idle_unload_secs=0), ()).idle_unload_secs == 0


def test_explanation_and_model_list_show_a_sleeping_model_as_sleeping() -> None:
    snapshot = snapshot_of(asleep(node("a"), "A"), node("b", "B"))
    explanation = explain(snapshot, "A")
    assert (explanation.decision, explanation.node, explanation.reason) == ("load", "a", "wakes into free memory")
    assert explanation.candidates[0].verdict.startswith("asleep: needs ")
    entry = next(entry for entry in model_list(snapshot.view, KNOWN, 1) if entry["id"] == "A")
    assert (entry["state"], entry["loaded"]) == ("sleeping", True)
    assert entry["locations"] == [{"node": "a", "status": "sleeping", "vram_estimate_mb": None}]
    assert entry["feasible_on"] == ["a", "b"]


async def test_request_wakes_a_sleeping_model_and_evicts_another_model_for_it() -> None:
    async with FakeNode("n1").with_memory_limit(9000, {"A": 6000, "B": 7000}).serving() as one:
        one.holds("A", granted_mb=6000)
        async with stage(one) as running:
            assert (await running.ask("A")).node == "n1" and one.loads == []
            one.sleeps("A")
            await eventually(lambda: running.fleet.node("n1").models["A"].status == "sleeping")
            assert (await running.ask("B")).node == "n1" and one.unloads == []
            assert running.holds("n1") == {"A", "B"}
            assert (await running.ask("A")).node == "n1" and one.unloads == ["B"]
            assert [load["model_id"] for load in one.loads] == ["B", "A"]
            assert running.fleet.node("n1").models["A"].status == "loaded"
            await running.lifecycle.unload("A", "n1")
            assert running.holds("n1") == set()


async def test_sleeping_model_is_unloaded_on_request() -> None:
    async with FakeNode("n1").with_memory_limit(9000, {"A": 6000}).serving() as one:
        one.holds("A")
        one.sleeps("A")
        async with stage(one) as running:
            await running.lifecycle.unload("A", "n1")
            assert one.unloads == ["A"] and one.models == []


async def test_request_for_a_model_that_cannot_wake_is_served_after_a_load_request() -> None:
    """The gateway believes that the model is loaded; the node has put it to sleep since the last poll."""

    async def speak(one: FakeNode, request: web.Request) -> web.StreamResponse:
        if one.loads:
            return await respond(one, request)
        error = {"message": "model 'Org/M' slept and could not wake", "type": "api_error", "code": "model_sleeping"}
        return web.json_response({"error": error | {"param": None}}, status=503)

    async with FakeNode("n1", speak=speak).holds("Org/M").serving() as one, running_cortex(one) as gateway:
        status, answer = await gateway.ask("Org/M")
        assert (status, [load["model_id"] for load in one.loads]) == (200, ["Org/M"]), answer


async def test_keep_alive_set_at_the_gateway_disables_idle_sleep_on_the_node() -> None:
    async with FakeNode("n1").holds("A", "B").serving() as one, stage(one) as running:
        for secs in (60, -1, 60):
            running.lifecycle.keep("A", secs)
        running.lifecycle.keep("B", 0)
        await eventually(lambda: one.unloads == ["B"])
        assert one.keeps == [{"model_id": "A", "idle_unload_secs": 0}]


@pytest.mark.parametrize("can_sleep", [True, False])
async def test_evicted_model_outside_the_catalog_sleeps_if_possible_and_wakes_later(can_sleep: bool) -> None:
    sizes = {"A": 6000, "own": 7000}
    async with FakeNode("n1", can_sleep=can_sleep).with_memory_limit(9000, sizes).serving() as one:
        one.holds("own", granted_mb=7000)
        async with stage(one) as running:
            assert (await running.ask("A")).node == "n1"
            assert one.unloads == ([] if can_sleep else ["own"])
            assert running.holds("n1") == ({"A", "own"} if can_sleep else {"A"})
            if can_sleep:
                assert (await running.ask("own")).node == "n1" and one.unloads == ["A"]


def test_node_report_older_than_a_sleep_or_wake_does_not_change_the_model_status() -> None:
    now = 10.0
    fleet = Fleet([NeuronSection(name="n1", endpoint="http://n1")], clock=lambda: now)

    def status_after_report(status: ModelStatus, began: float) -> str:
        fleet.answered("n1", Report(models={"A": ModelInfo(id="A", status=status)}), began)
        return fleet.node("n1").models["A"].status

    assert status_after_report("loaded", 1.0) == "loaded"
    fleet.fell_asleep("n1", "A")
    assert status_after_report("loaded", 9.0) == "sleeping"
    assert status_after_report("loaded", 11.0) == "loaded"
    fleet.fell_asleep("n1", "A")
    now = 20.0
    fleet.loaded("n1", ModelInfo(id="A"), "http://n1")
    assert status_after_report("sleeping", 19.0) == "loaded"
    assert status_after_report("sleeping", 21.0) == "sleeping"
    assert not fleet.view().loaded_at
