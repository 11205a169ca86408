"""Estimates the free memory of each device during and shortly after loads and unloads.

The free memory that a node reports is called its reading. A reading may not show recent loads and unloads yet, so the
estimate adds them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from helexa.cortex.fleet.fleet_view import Node

HOST = -1
"""Device index for main memory on a node without accelerators."""

READING_LAG_SECS = 6.0  # maximum age of the memory readings in a node's report

Megabytes = Mapping[int, int]
"""MB by device index."""


def totals(node: Node) -> dict[int, int]:
    """Return the total memory of a node in MB, by device index.

    A node without accelerators has the single device `HOST`. If the node's hardware is unknown, the result is empty.
    """
    if node.discovery is None:
        return {}
    devices = {device.index: device.vram_total_mb for device in node.discovery.devices}
    return devices or {HOST: node.discovery.memory_total_mb}


def reading(node: Node) -> dict[int, int] | None:
    """Return the free MB by device index from the node's last health report, or None if it reports no devices."""
    if node.health is None or not node.health.devices:
        return None
    return {device.index: device.vram_free_mb for device in node.health.devices}


@dataclass(eq=False)
class MemoryChange:
    """Change of a node's memory use by one load or unload.

    Attributes:
        megabytes: MB by device index. The MB are positive for memory that a load uses or will use, and negative for
            memory that an unload has freed.
        ended_at: when the load or unload ended (monotonic seconds); None if it is still running.
    """

    megabytes: Megabytes
    ended_at: float | None = None


def additional_mb(required: Megabytes, evicted: Iterable[Megabytes]) -> Megabytes:
    """Return, by device index, the MB that a load needs beyond the memory of the models that it evicts.

    The result is at least 0 for each device.

    Args:
        required: MB that the load needs, by device index.
        evicted: for each model to evict, its MB by device index.
    """
    freed = list(evicted)
    return {index: max(0, needed - sum(memory.get(index, 0) for memory in freed)) for index, needed in required.items()}


@dataclass
class _NodeChanges:
    """Memory state of one node with running or recent loads or unloads.

    Attributes:
        initial: free MB by device index before the first change; None if the node does not report free memory.
        latest: last reported free MB by device index; None if the node does not report free memory.
        changes: changes that the reported free memory may not fully include yet.
    """

    initial: Megabytes | None
    latest: Megabytes | None
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
        """Begin to track a change of a node's memory."""
        free_mb = reading(node)
        self._by_node.setdefault(node.name, _NodeChanges(free_mb, free_mb)).changes.append(change)

    def cancel(self, node: str, change: MemoryChange) -> None:
        """Remove a tracked change, because its load or unload does not take place."""
        node_changes = self._by_node.get(node)
        if node_changes is not None and change in node_changes.changes:
            node_changes.changes.remove(change)
            if not node_changes.changes:
                del self._by_node[node]

    def update(self, node: Node) -> None:
        """Store the node's last reading. If all changes of the node ended before it, stop tracking the changes."""
        node_changes = self._by_node.get(node.name)
        if node_changes is None:
            return
        node_changes.latest = reading(node) or node_changes.latest
        end_times = [change.ended_at for change in node_changes.changes]
        # inf: the node reports no free memory, so no reading is awaited
        covered_until = inf if node_changes.initial is None else (node.read_at or 0.0) - READING_LAG_SECS
        if all(end_time is not None and end_time <= covered_until for end_time in end_times):
            del self._by_node[node.name]

    def expected_free(self) -> dict[str, Megabytes]:
        """Return the expected free MB by node name and device index.

        The result contains only nodes that have tracked changes and report their free memory.
        """
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
