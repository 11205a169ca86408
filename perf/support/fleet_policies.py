"""Policies for the simulation of a fleet: the gateway's own policy, and a simple policy for comparison.

A policy chooses the nodes of requests, and the models to load and to evict (see `fleet_world.Policy`).
"""

import random
from collections.abc import Sequence

from helexa.cortex.config import EvictionSection, RoutingSection
from helexa.cortex.fleet.fleet_view import Node
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.load_queue import QueuedModel, decide
from helexa.cortex.lifecycle.placement import ColdPlacement, load_spec
from helexa.cortex.routing import route
from support.fleet_world import Queue, Request, World


class HelexaPolicy:
    """The gateway's policy: uses the gateway's own functions for routing, placement, eviction and load order."""

    def __init__(self, seed: int, eviction: EvictionSection | None = None) -> None:
        self._random = random.Random(seed)
        self._eviction = eviction or EvictionSection()
        self._routing = RoutingSection()

    def target(self, world: World, request: Request) -> str | None:
        key = request.conversation.name.encode()
        choice = route(world.fleet.view(), request.model, key, self._routing, self._random.choice)
        return choice.node if choice else None

    def decide(self, world: World) -> None:
        def start(wanted: QueuedModel, cold: ColdPlacement) -> None:
            world.start(world.queues[wanted.model], cold)

        decide([queue.queued for queue in world.queues.values() if not queue.loading], lambda: self._look(world), start)

    def _look(self, world: World) -> FleetSnapshot:
        return FleetSnapshot(
            world.fleet.view(),
            world.catalog,
            world.now,
            settings=self._eviction,
            reserved=world.memory.reserved(),
            load_secs=world.history.load_secs,
        )


class LruFifo:
    """Simple policy for comparison: loads models in the order of requests, evicts the least recently used models.

    It routes a request to the node with the fewest requests. It drains and evicts a busy model only if the eviction of
    idle models does not free enough memory.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def target(self, world: World, request: Request) -> str | None:
        choice = route(world.fleet.view(), request.model, None, None, self._random.choice)
        return choice.node if choice else None

    def decide(self, world: World) -> None:
        for queue in sorted(
            (queue for queue in world.queues.values() if not queue.loading), key=lambda queue: queue.queued.since
        ):
            cold = self._place(world, queue)
            if cold is None:
                return  # later requests must not overtake this request
            world.start(queue, cold)

    def _place(self, world: World, queue: Queue) -> ColdPlacement | None:
        snapshot = FleetSnapshot(world.fleet.view(), world.catalog, world.now, reserved=world.memory.reserved())
        profile = world.catalog.profile(queue.model)
        assert profile is not None
        need, spec = profile.vram_mb or 0, load_spec(profile, [0])
        best: tuple[tuple[bool, bool, int, str], ColdPlacement] | None = None
        for node in snapshot.view.nodes:
            victims = _oldest_first(snapshot, node, need)
            if victims is None or (node.name, queue.model) in snapshot.view.draining:
                continue
            busy = any(snapshot.view.load(node, model) for model in victims)
            rank = (bool(victims), busy, -snapshot.free(node)[0], node.name)
            if best is None or rank < best[0]:
                best = (rank, ColdPlacement(queue.model, node.name, spec, tuple(victims)))
        return best[1] if best else None


def _oldest_first(snapshot: FleetSnapshot, node: Node, need: int) -> Sequence[str] | None:
    """Return the models to evict from `node` so that `need` MB are free: idle models first, least recently used first.

    Returns:
        Model ids, or None if the node is too small even without its models.
    """
    free, victims = snapshot.free(node)[0], list[str]()
    residents = [resident for resident in snapshot.residents(node) if not resident.loading]
    for resident in sorted(residents, key=lambda resident: (resident.busy, resident.used_at or 0.0, resident.model)):
        if free >= need:
            break
        free += resident.megabytes[0]
        victims.append(resident.model)
    return victims if free >= need else None
