"""Memory of nodes: which devices can hold a model, and how much memory is free.

The free memory that a node reports is called its reading. A reading may not show recent loads and unloads yet, so
`MemoryEstimator` corrects the reading for them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from helexa.core.catalog import Profile
from helexa.core.display import memory_text
from helexa.core.node_reports import Device, Discovery, alike
from helexa.cortex.fleet.fleet_view import Node

HOST = -1  # device index for main memory on a node without accelerators

READING_LAG_SECS = 6.0  # maximum age of the memory readings in a node's report

Megabytes = Mapping[int, int]  # MB by device index


def totals(node: Node) -> dict[int, int]:
    """Return the total memory of a node in MB, by device index.

    The total is at most the node's own memory limit. A node without accelerators has the single device `HOST`. If the
    node's hardware is unknown, the result is empty.
    """
    if node.discovery is None:
        return {}
    devices = {device.index: device.vram_total_mb for device in node.discovery.devices}
    limit_mb = node.discovery.memory_limit_mb or inf
    sizes_mb = devices or {HOST: node.discovery.memory_total_mb}
    return {index: int(min(size_mb, limit_mb)) for index, size_mb in sizes_mb.items()}


def reading(node: Node) -> dict[int, int] | None:
    """Return the free MB that a node reports, by device index; None if not reported.

    The result is what a new model may use: nodes subtract the memory that they have promised to their models, and apply
    their memory limit. A node that does not report this value reports the free memory of the machine.
    """
    if node.health is None:
        return None
    if not node.health.devices:
        free_mb = node.health.memory_free_mb if node.health.grantable_mb is None else node.health.grantable_mb
        has_accelerators = node.discovery is not None and node.discovery.devices
        return None if free_mb is None or has_accelerators else {HOST: free_mb}
    return {
        device.index: device.vram_free_mb if device.grantable_mb is None else device.grantable_mb
        for device in node.health.devices
    }


@dataclass(eq=False)
class MemoryChange:
    """Change of a node's memory use by one load or unload."""

    # MB by device index. The MB are positive for memory that a load uses or will use, and negative for memory that an
    # unload has freed.
    megabytes: Megabytes
    ended_at: float | None = None  # when the load or unload ended (monotonic seconds); None if it is still running


def additional_mb(required: Megabytes, evicted: Iterable[Megabytes]) -> Megabytes:
    """Return the MB by device that a load needs beyond what the evictions free.

    Each value is at least 0.
    """
    freed = list(evicted)
    return {index: max(0, needed - sum(memory.get(index, 0) for memory in freed)) for index, needed in required.items()}


@dataclass
class _NodeChanges:
    """Memory state of one node with running or recent loads or unloads."""

    # free MB by device index before the first change; None if the node does not report free memory
    initial: Megabytes | None
    latest: Megabytes | None  # last reported free MB by device index; None if the node does not report free memory
    # changes that the reported free memory may not fully include yet
    changes: list[MemoryChange] = field(default_factory=list[MemoryChange])


class MemoryEstimator:
    """Estimates the free memory of nodes that have running or recent loads or unloads.

    During a load or unload, the free memory that a node reports (its reading) includes an unknown part of the change.
    The change is therefore tracked until a later reading includes the whole change. Meanwhile, the expected free memory
    of a device is the smaller of these two values:

    * reading before the first tracked change - memory of tracked loads + memory of tracked unloads
    * last reading + memory of tracked unloads

    The second value is smaller if other processes have begun to use memory.
    """

    def __init__(self) -> None:
        self._by_node: dict[str, _NodeChanges] = {}

    def begin(self, node: Node, change: MemoryChange) -> None:
        """Begin to track a change of a node's memory.

        The caller sets `change.ended_at` when the load or unload has ended, or else calls `cancel`.
        """
        free_mb = reading(node)
        self._by_node.setdefault(node.name, _NodeChanges(free_mb, free_mb)).changes.append(change)

    def cancel(self, node: str, change: MemoryChange) -> None:
        """Remove a tracked change, because its load or unload does not take place."""
        node_changes = self._by_node.get(node)
        if node_changes is not None and change in node_changes.changes:
            node_changes.changes.remove(change)
            if not node_changes.changes:
                del self._by_node[node]

    def correct(self, node: Node, free_mb: Megabytes, now: float) -> None:
        """Replace the estimate of some devices by the free MB that a node states."""
        # The next readings may be older than the stated values. The empty change that ends now keeps the stated values
        # until a reading is certainly newer.
        tracked = self._by_node.get(node.name)
        running = [] if tracked is None else [change for change in tracked.changes if change.ended_at is None]
        expected = {**(self.expected_free().get(node.name) or reading(node) or {}), **free_mb}
        self._by_node[node.name] = _NodeChanges(expected, expected, [*running, MemoryChange({}, ended_at=now)])

    def update(self, node: Node) -> None:
        """Store the node's reading; forget the changes if the reading includes them all."""
        node_changes = self._by_node.get(node.name)
        if node_changes is None:
            return
        node_changes.latest = reading(node) or node_changes.latest
        end_times = [change.ended_at for change in node_changes.changes]
        # If the node reports no free memory, no reading will ever include the changes, so do not wait for a reading.
        covered_until = inf if node_changes.initial is None else (node.read_at or 0.0) - READING_LAG_SECS
        if all(end_time is not None and end_time <= covered_until for end_time in end_times):
            del self._by_node[node.name]

    def expected_free(self) -> dict[str, Megabytes]:
        """Return expected free MB by node and device, for reporting nodes with changes."""
        return {
            name: _expected(node_changes.initial, node_changes.latest or node_changes.initial, node_changes.changes)
            for name, node_changes in self._by_node.items()
            if node_changes.initial is not None
        }

    def reserved(self) -> dict[str, Megabytes]:
        """Return the MB that running loads will use, by node name and device index."""
        return {
            name: _sum(change for change in node_changes.changes if change.ended_at is None)
            for name, node_changes in self._by_node.items()
        }


def _expected(initial: Megabytes, latest: Megabytes, changes: list[MemoryChange]) -> Megabytes:
    used_mb = _sum(changes)
    freed_mb = _sum(
        MemoryChange({index: min(0, size) for index, size in change.megabytes.items()}) for change in changes
    )
    return {
        index: min(free_mb - used_mb.get(index, 0), latest.get(index, 0) - freed_mb.get(index, 0))
        for index, free_mb in initial.items()
    }


def _sum(changes: Iterable[MemoryChange]) -> Megabytes:
    total: dict[int, int] = {}
    for change in changes:
        for index, megabytes in change.megabytes.items():
            total[index] = total.get(index, 0) + megabytes
    return total


@dataclass(frozen=True)
class DevicePool:
    """Devices with enough memory, from which the devices for a model are chosen."""

    devices: tuple[int, ...]
    # Number of devices to choose. This is the model's `min_devices`. In the pool of the device `HOST`, it is 1, because
    # all ranks of a model share the host's memory.
    count: int


def device_pools(profile: Profile, discovery: Discovery) -> list[DevicePool]:
    """Return pools of devices whose memory can hold the model; empty if none can."""
    if misfit(profile, discovery) is not None:
        return []
    if not discovery.devices:
        return [DevicePool((HOST,), 1)]
    count = profile.min_devices
    groups = [group for group in _groups(profile, discovery) if len(group) >= count]
    return [DevicePool(tuple(device.index for device in group), count) for group in groups]


def misfit(profile: Profile, discovery: Discovery) -> str | None:
    """Return why a node's hardware cannot hold the model in memory; None if it can."""
    count, floor_mb = profile.min_devices, profile.min_device_vram_mb
    needs = f"needs {count} device{'s' if count > 1 else ''}" + (f" of {memory_text(floor_mb)}" if floor_mb else "")
    ranks = discovery.max_tensor_parallel
    if not discovery.devices:
        if floor_mb:
            return f"{needs}; the node has no accelerator"
        ranks = ranks or 1
    if ranks is not None and count > max(ranks, 1):
        return f"{needs}; the node can divide a model among at most {ranks}"
    if not discovery.devices:
        return None
    groups = _groups(profile, discovery)
    largest = max(map(len, groups), default=0)
    if largest >= count:
        return None
    return f"{needs}; the node has {largest or 'none'}" + (" that are alike" if len(groups) > 1 else "")


def _groups(profile: Profile, discovery: Discovery) -> list[list[Device]]:
    """Return groups of devices with enough total memory for a share of the model.

    If all ranks of the model must run on devices of one kind, there is one group for each kind of device. Otherwise,
    there is one group.
    """
    floor_mb = profile.min_device_vram_mb or 0
    capable = [device for device in discovery.devices if device.vram_total_mb >= floor_mb]
    needs_alike = profile.min_devices > 1 and discovery.max_tensor_parallel is not None
    return alike(capable) if needs_alike else [capable]
