"""How much memory is free where, while loads and unloads run whose effect no reading shows yet."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from helexa.cortex.fleet.picture import Node

HOST = -1
"""The one "device" of a node without accelerators: its main memory."""

READING_LAG_SECS = 6.0  # a node's readings may be some seconds old when it reports them

Megabytes = Mapping[int, int]
"""Device index -> MB."""


def totals(node: Node) -> dict[int, int]:
    """MB of every device; of main memory where there is none; nothing while the hardware is unknown."""
    if node.discovery is None:
        return {}
    devices = {device.index: device.vram_total_mb for device in node.discovery.devices}
    return devices or {HOST: node.discovery.memory_total_mb}


def reading(node: Node) -> dict[int, int] | None:
    """Free MB of every device as the node last said, None when it did not."""
    if node.health is None or not node.health.devices:
        return None
    return {device.index: device.vram_free_mb for device in node.health.devices}


@dataclass(eq=False)
class Change:
    """Memory that will be taken (MB > 0) on a node, or was given back (MB < 0), by device."""

    megabytes: Megabytes
    ended_at: float | None = None


def beyond(needs: Megabytes, leaving: Iterable[Megabytes]) -> Megabytes:
    """What a model needs beyond what those hold that leave for it. What they hold beyond its needs is nobody's until
    they are gone."""
    held = list(leaving)
    return {index: max(0, need - sum(one.get(index, 0) for one in held)) for index, need in needs.items()}


@dataclass
class _Page:
    """One node's changes, what was free before the first of them, and what its last reading says."""

    before: Megabytes | None
    latest: Megabytes | None
    changes: list[Change] = field(default_factory=list[Change])


class MemoryBook:
    """Reserves memory when a load is decided, until the node's own reading includes it.

    While a node has changes, what is free there is what was free before them, less what they take: its readings show an
    unknown part of each change. Others may take memory too, so it is never more than the reading and what comes back.
    """

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}

    def begin(self, node: Node, change: Change) -> None:
        """Count a change from now on."""
        free = reading(node)
        self._pages.setdefault(node.name, _Page(free, free)).changes.append(change)

    def cancel(self, node: str, change: Change) -> None:
        """A change will not happen."""
        page = self._pages.get(node)
        if page is not None and change in page.changes:
            page.changes.remove(change)
            if not page.changes:
                del self._pages[node]

    def turn(self, node: Node) -> None:
        """Look at the node's reading, and believe it again once it is younger than all changes."""
        page = self._pages.get(node.name)
        if page is None:
            return
        page.latest = reading(node) or page.latest
        ends = [change.ended_at for change in page.changes]
        seen = inf if page.before is None else (node.read_at or 0.0) - READING_LAG_SECS  # without readings: the models
        if all(end is not None and end <= seen for end in ends):
            del self._pages[node.name]

    def expected_free(self) -> dict[str, Megabytes]:
        """Free MB by device, of the nodes that have changes and tell what is free."""
        return {
            name: _expected(page.before, page.latest or page.before, page.changes)
            for name, page in self._pages.items()
            if page.before is not None
        }

    def reserved(self) -> dict[str, Megabytes]:
        """MB by device that running loads will take, of the nodes that have any."""
        return {
            name: _sum(change for change in page.changes if change.ended_at is None)
            for name, page in self._pages.items()
        }


def _expected(before: Megabytes, latest: Megabytes, changes: list[Change]) -> Megabytes:
    taken = _sum(changes)
    back = _sum(Change({index: min(0, size) for index, size in change.megabytes.items()}) for change in changes)
    return {
        index: min(free - taken.get(index, 0), latest.get(index, 0) - back.get(index, 0))
        for index, free in before.items()
    }


def _sum(changes: Iterable[Change]) -> Megabytes:
    total: dict[int, int] = {}
    for change in changes:
        for index, megabytes in change.megabytes.items():
            total[index] = total.get(index, 0) + megabytes
    return total
