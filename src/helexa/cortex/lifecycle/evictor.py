"""Eviction policy: which models leave a node, when, and in which order.

All functions are pure functions of a `FleetSnapshot`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from helexa.core.catalog import DEFAULT_RESIDENCY, PINNED_RESIDENCY, Profile
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet_view import Node
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot, ResidentModel
from helexa.cortex.lifecycle.memory import DevicePool, device_pools

LEAST_RESIDENCY_SECS = 1.0  # time for the requests that waited for a loaded model to reach the node
IDLE_RELOADS = 0.5  # a model idle for this fraction of its reload time may be evicted

# An estimate from the files is too high by at most 15 %. If less than this fraction of the estimated memory is free,
# the model certainly does not fit.
_SURE = 0.85

_ANY = -(1 << 62)  # MB per device to require if the model's size is unknown: any amount of free memory suffices


@dataclass(frozen=True)
class EvictionPlan:
    """A plan to fit a model on a node: devices, and models to evict first."""

    devices: tuple[int, ...]  # indices of the devices to load the model on
    evict: tuple[ResidentModel, ...]  # models to evict first, in this order
    # Time from which all models in `evict` may be evicted (monotonic seconds). Infinity if the plan must first wait for
    # a running load.
    ready_at: float
    # True if the model fits according to the memory estimates. False if it does not fit, but no other model is on the
    # node. The load can then be tried, because it evicts nothing.
    fits: bool = True

    def cost(self, now: float) -> float:
        """Return the cost of the evictions: the sum of reload time * weight / idle time."""
        return sum(1 / _score(resident, now) for resident in self.evict)


def plan_eviction(snapshot: FleetSnapshot, node: Node, profile: Profile, since: float) -> EvictionPlan | None:
    """Return the preferred plan to load a model on a node, or None if there is none.

    A plan is preferred if it fits, then if it can start early, then by `preference`. There is no plan if the model does
    not fit even after all allowed evictions, unless the node is empty: see `EvictionPlan.fits`.

    `since` is when the oldest waiting request for the model arrived (monotonic seconds).
    """
    pools = device_pools(profile, node.discovery) if node.discovery is not None else []
    plans = [_plan_on_pool(snapshot, node, profile, since, pool) for pool in pools]
    return min(
        (plan for plan in plans if plan is not None),
        key=lambda plan: (not plan.fits, plan.ready_at, preference(snapshot, node, plan)),
        default=None,
    )


def preference(snapshot: FleetSnapshot, node: Node, plan: EvictionPlan) -> tuple[bool, bool, float, int]:
    """Return the sort key of a plan; the smallest key is preferred.

    In order of importance: the plan fits, it evicts nothing, its evictions cost little, and its devices have much free
    memory.
    """
    free_mb = snapshot.free(node)
    free_on_devices = sum(free_mb.get(device, 0) for device in plan.devices)
    return not plan.fits, bool(plan.evict), plan.cost(snapshot.now), -free_on_devices


def _plan_on_pool(
    snapshot: FleetSnapshot, node: Node, profile: Profile, since: float, pool: DevicePool
) -> EvictionPlan | None:
    needed_mb = snapshot.needs_mb(profile.id, node)
    share_mb = -(-needed_mb // pool.count) if needed_mb else _ANY
    free = {index: free for index, free in snapshot.free(node).items() if index in pool.devices}
    residents = snapshot.residents(node)
    devices = _fitting_devices(free, share_mb, pool.count)
    if devices is not None:
        return EvictionPlan(devices, (), snapshot.now)
    evictable = [
        resident
        for resident in residents
        if resident.rank <= snapshot.rank(profile.id) and resident.model != profile.id
    ]
    to_evict = _sufficient_evictions(free, share_mb, pool.count, _eviction_order(snapshot, evictable, since))
    if to_evict is not None:
        devices = _fitting_devices(_free_after(free, to_evict), share_mb, pool.count)
        ready_at = max(_evictable_at(snapshot, resident, since) for resident in to_evict)
        return EvictionPlan(devices or (), tuple(to_evict), max(ready_at, snapshot.now))
    # Estimates can be wrong. On an empty node, the attempt costs nothing.
    devices = _fitting_devices(free, _ANY, pool.count)
    if residents or devices is None:
        return None
    estimate_mb = snapshot.estimate_mb(profile.id, node) or 0
    if min(free[device] for device in devices) < _SURE * estimate_mb / pool.count:
        return None  # the estimate comes from the model's files, and is not wrong by that much
    return EvictionPlan(devices, (), snapshot.now, fits=False)


def expired_models(snapshot: FleetSnapshot) -> list[Pair]:
    """Return the (node, model) pairs to unload after their idle time.

    Pinned models are never unloaded. A model without a profile is unloaded only if a client has set its idle time to 0,
    because the gateway could not load the model again.
    """
    return [
        (node.name, resident.model)
        for node in snapshot.view.nodes
        if node.healthy and node.kind == "neuron"
        for resident in snapshot.residents(node)
        if _is_expired(snapshot, resident)
    ]


def _is_expired(snapshot: FleetSnapshot, resident: ResidentModel) -> bool:
    expires_at, now = expiry(snapshot, resident), snapshot.now
    if resident.awaited_at is not None and now - resident.awaited_at < LEAST_RESIDENCY_SECS:
        return False  # a request that has waited for the load may be on its way to the node
    return expires_at is not None and now >= expires_at


def expiry(snapshot: FleetSnapshot, resident: ResidentModel) -> float | None:
    """Return when an idle model will be unloaded (monotonic seconds).

    None means that the model is busy, loading or pinned, has no idle limit, or could not be loaded again.
    """
    ttl = snapshot.idle_ttl_secs(resident.model)
    if resident.busy or resident.loading or resident.rank >= PINNED_RESIDENCY or ttl == inf:
        return None
    # A model without a profile stays loaded, because the gateway could not load it again.
    if ttl and snapshot.profile(resident.model) is None:
        return None
    return max(resident.used_at or 0.0, resident.loaded_at or 0.0, snapshot.began) + ttl


def _evictable_at(snapshot: FleetSnapshot, resident: ResidentModel, since: float) -> float:
    """Return the time from which a model may be evicted; infinity during its load.

    A model may be evicted once it has been idle for half of its reload time (`IDLE_RELOADS`) or for `swap_wait_secs`,
    or `swap_wait_secs` after `since`, the arrival time of the oldest request that needs the memory. Even then, a model
    is not evicted:
    * within `min_residency_secs` after its load
    * within `LEAST_RESIDENCY_SECS` after requests that had waited for the model were forwarded to the node
    """
    settings = snapshot.settings
    if resident.loading:
        return inf
    residency_secs = max(settings.min_residency_secs, LEAST_RESIDENCY_SECS)
    residency_until = -inf if resident.loaded_at is None else resident.loaded_at + residency_secs
    request_until = -inf if resident.awaited_at is None else resident.awaited_at + LEAST_RESIDENCY_SECS
    idle_secs = min(settings.swap_wait_secs, IDLE_RELOADS * resident.reload_secs)
    idle_at = inf if resident.busy else -inf if resident.used_at is None else resident.used_at + idle_secs
    return max(residency_until, request_until, min(idle_at, since + settings.swap_wait_secs))


def _eviction_order(snapshot: FleetSnapshot, residents: list[ResidentModel], since: float) -> list[ResidentModel]:
    by_class = snapshot.settings.strategy == "priority"

    def order(resident: ResidentModel) -> tuple[float, int, float, str]:
        evictable_at = max(_evictable_at(snapshot, resident, since), snapshot.now)
        return evictable_at, resident.rank if by_class else 0, -_score(resident, snapshot.now), resident.model

    return sorted(residents, key=order)


def _score(resident: ResidentModel, now: float) -> float:
    """Return idle time / (reload time * weight). The highest score is evicted first.

    The weight is proportional to the model's `residency_priority`.
    """
    weight = max(resident.rank, 1) / DEFAULT_RESIDENCY
    return max(resident.idle_secs(now), 1e-3) / (max(resident.reload_secs, 0.1) * weight)


def _sufficient_evictions(
    free: Mapping[int, int], share: int, devices: int, ordered: list[ResidentModel]
) -> list[ResidentModel] | None:
    """Return the models to evict, or None if all of `ordered` would free too little.

    Args:
        share: MB that the new model needs on each of its devices.
        devices: number of devices that the new model needs.
        ordered: the candidates in the order of eviction.
    """
    to_evict: list[ResidentModel] = []
    for resident in ordered:
        # a model that uses none of the devices in `free` would free nothing for the new model
        if not free.keys() & resident.megabytes.keys():
            continue
        to_evict.append(resident)
        if _fitting_devices(_free_after(free, to_evict), share, devices) is not None:
            break
    else:
        return None
    # A large model at the end may make earlier evictions unnecessary.
    for resident in reversed(to_evict[:-1]):
        without_one = [victim for victim in to_evict if victim is not resident]
        if _fitting_devices(_free_after(free, without_one), share, devices) is not None:
            to_evict = without_one
    return to_evict


def _free_after(free: Mapping[int, int], leaving: Collection[ResidentModel]) -> dict[int, int]:
    return {
        index: megabytes + sum(resident.megabytes.get(index, 0) for resident in leaving)
        for index, megabytes in free.items()
    }


def _fitting_devices(free: Mapping[int, int], share: int, devices: int) -> tuple[int, ...] | None:
    """Return the indices of the `devices` devices with the most free memory.

    Each of these devices has at least `share` MB free. The result is None if fewer than `devices` devices have as much.
    """
    fitting = sorted((index for index in free if free[index] >= share), key=lambda index: (-free[index], index))
    return tuple(sorted(fitting[:devices])) if len(fitting) >= devices else None
