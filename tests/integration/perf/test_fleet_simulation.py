"""The fleet simulation at a small size.

`World` itself asserts that no node's memory is exceeded and no model is unloaded while in use.
"""

import importlib
import random

import pytest

from helexa.core.catalog import Catalog


@pytest.fixture
def simulation():
    return importlib.import_module("fleet_simulation")


def test_helexas_placement_policy_halves_model_swaps_and_lowers_ttft(simulation):
    runs = [simulation.compare(seed, minutes=10, per_minute=9, count=12) for seed in (1, 2)]
    assert {line["verdict"]: line["holds"] for line in simulation.verdicts(runs)} == {
        "swaps": True,
        "ttft_p99": True,
        "longest_wait": True,
    }


def test_fleet_simulation_with_equal_seeds_gives_equal_results(simulation):
    first, second = (simulation.compare(3, minutes=3, per_minute=9, count=12) for _ in range(2))
    assert first == second
    assert first != simulation.compare(4, minutes=3, per_minute=9, count=12)


def test_placement_policy_groups_alternating_requests_to_halve_model_swaps(simulation):
    traffic, world = importlib.import_module("support.fleet_traffic"), importlib.import_module("support.fleet_world")
    policies = importlib.import_module("support.fleet_policies")
    catalog = Catalog.model_validate({"models": [{"id": "A", "vram_mb": 9000}, {"id": "B", "vram_mb": 9000}]})
    turn = traffic.Turn(100, 50, 0.0)
    abab = [traffic.Conversation(f"c{i}", "AB"[i % 2], 4.0 * i, (turn,)) for i in range(40)]

    def swaps(policy):
        return world.World(catalog, policy, abab, {"n": 12000}).run().evictions

    assert 0 < 2 * swaps(policies.HelexaPolicy(1)) <= swaps(policies.LruFifo(1))


@pytest.mark.parametrize("seed", range(4))
def test_every_simulated_request_is_served_by_a_small_fleet(simulation, seed):
    traffic, world = importlib.import_module("support.fleet_traffic"), importlib.import_module("support.fleet_world")
    policies = importlib.import_module("support.fleet_policies")
    rng = random.Random(seed)
    catalog = traffic.models(12)
    nodes = {"large": 41_000, "small": rng.randint(5_000, 25_000)}
    conversations = traffic.conversations(seed, catalog, 120, rng.choice((3, 6, 12)))
    eviction = policies.EvictionSection(
        min_residency_secs=rng.choice((0, 30, 90)),
        swap_wait_secs=rng.choice((0, 30, 90)),
        strategy=rng.choice(("lru", "priority")),
    )
    outcome = world.World(catalog, policies.HelexaPolicy(seed, eviction), conversations, nodes).run()
    assert len(outcome.ttfts) == sum(len(conversation.turns) for conversation in conversations)
    assert max(outcome.waits) < simulation.LONGEST_WAIT_SECS
