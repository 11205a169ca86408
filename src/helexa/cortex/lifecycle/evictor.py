"""What makes room: which models may leave a node, when, and in which order. Pure functions of a situation."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from helexa.core.catalogue import DEFAULT_RESIDENCY, PINNED_RESIDENCY, Profile
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.picture import Node
from helexa.cortex.lifecycle.memory import totals
from helexa.cortex.lifecycle.situation import Resident, Situation

LEAST_RESIDENCY_SECS = 1.0  # those who waited for a model must have had time to ask it
IDLE_RELOADS = 0.5  # a model idle for this part of its reload time is done with its batch


_ANY = -(1 << 62)
"""Free MB that every device has."""


@dataclass(frozen=True)
class Clearing:
    """How a model comes to fit on a node.

    Attributes:
        devices: where it goes.
        evict: what has to leave first, in order.
        ready_at: when that may begin; infinite while it waits for something of unknown length, such as a load.
        fits: the estimates say that it will fit; else the node is empty, and a try costs nobody anything.
    """

    devices: tuple[int, ...]
    evict: tuple[Resident, ...]
    ready_at: float
    fits: bool = True

    def cost(self, now: float) -> float:
        """What the evictions are likely to cost: reload time, the less the longer it was not needed."""
        return sum(1 / _score(resident, now) for resident in self.evict)


def clearing(situation: Situation, node: Node, profile: Profile, since: float) -> Clearing | None:
    """How to make just enough room for a model that has been wanted since `since`; None if nothing could."""
    need = situation.needs_mb(profile.id)
    share = -(-need // profile.min_devices) if need else _ANY
    free = {index: free for index, free in situation.free(node).items() if index in capable_devices(profile, node)}
    residents = situation.residents(node)
    devices = _roomy(free, share, profile.min_devices)
    if devices is not None:
        return Clearing(devices, (), situation.now)
    evictable = [one for one in residents if one.rank <= situation.rank(profile.id) and one.model != profile.id]
    chosen = _enough(free, share, profile.min_devices, _in_order(situation, evictable, since))
    if chosen is not None:
        devices = _roomy(_without(free, chosen), share, profile.min_devices)
        ready_at = max(_ripe_at(situation, one, since) for one in chosen)
        return Clearing(devices or (), tuple(chosen), max(ready_at, situation.now))
    devices = _roomy(free, _ANY, profile.min_devices)
    return None if residents or devices is None else Clearing(devices, (), situation.now, fits=False)


def expired(situation: Situation) -> list[Pair]:
    """The models that nobody asked for during `idle_ttl_secs`, without pinned ones and any that could not come back."""
    ttl, now = situation.settings.idle_ttl_secs, situation.now
    return [
        (node.name, resident.model)
        for node in situation.view.nodes
        if ttl and node.healthy and node.kind == "neuron"
        for resident in situation.residents(node)
        if not resident.busy and not resident.loading and resident.rank < PINNED_RESIDENCY
        if situation.catalogue.profile(resident.model) is not None
        if now - max(resident.used_at or 0.0, resident.loaded_at or 0.0, situation.began) >= ttl
    ]


def capable_devices(profile: Profile, node: Node) -> list[int]:
    """The devices that are large enough for the model's part of each."""
    floor = profile.min_device_vram_mb or 0
    return [index for index, megabytes in totals(node).items() if megabytes >= floor]


def _ripe_at(situation: Situation, resident: Resident, since: float) -> float:
    """When a model may leave: done with its batch, or when the other has waited long enough; never too young."""
    settings = situation.settings
    if resident.loading:
        return inf
    residency = max(settings.min_residency_secs, LEAST_RESIDENCY_SECS)
    young_until = -inf if resident.loaded_at is None else resident.loaded_at + residency
    asked_by = -inf if resident.awaited_at is None else resident.awaited_at + LEAST_RESIDENCY_SECS
    patience = min(settings.swap_wait_secs, IDLE_RELOADS * resident.reload_secs)
    done_at = inf if resident.busy else -inf if resident.used_at is None else resident.used_at + patience
    return max(young_until, asked_by, min(done_at, since + settings.swap_wait_secs))


def _in_order(situation: Situation, residents: list[Resident], since: float) -> list[Resident]:
    """What may leave soonest first; of those that may now, what costs least."""
    by_class = situation.settings.strategy == "priority"

    def order(one: Resident) -> tuple[float, int, float, str]:
        ripe_at = max(_ripe_at(situation, one, since), situation.now)
        return ripe_at, one.rank if by_class else 0, -_score(one, situation.now), one.model

    return sorted(residents, key=order)


def _score(resident: Resident, now: float) -> float:
    """Idle time over what bringing the model back would cost; the highest leaves first."""
    weight = max(resident.rank, 1) / DEFAULT_RESIDENCY
    return max(resident.idle_secs(now), 1e-3) / (max(resident.reload_secs, 0.1) * weight)


def _enough(free: Mapping[int, int], share: int, devices: int, ordered: list[Resident]) -> list[Resident] | None:
    """The first few that leave room, without those whose leaving turned out not to matter."""
    chosen: list[Resident] = []
    for resident in ordered:
        if not free.keys() & resident.megabytes.keys():
            continue
        chosen.append(resident)
        if _roomy(_without(free, chosen), share, devices) is not None:
            break
    else:
        return None
    for resident in reversed(chosen[:-1]):
        fewer = [one for one in chosen if one is not resident]
        if _roomy(_without(free, fewer), share, devices) is not None:
            chosen = fewer
    return chosen


def _without(free: Mapping[int, int], leaving: Collection[Resident]) -> dict[int, int]:
    return {
        index: megabytes + sum(resident.megabytes.get(index, 0) for resident in leaving)
        for index, megabytes in free.items()
    }


def _roomy(free: Mapping[int, int], share: int, devices: int) -> tuple[int, ...] | None:
    """The devices with most room, if enough of them have `share` MB."""
    roomy = sorted((index for index in free if free[index] >= share), key=lambda index: (-free[index], index))
    return tuple(sorted(roomy[:devices])) if len(roomy) >= devices else None
