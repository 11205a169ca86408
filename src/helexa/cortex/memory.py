"""How much memory is free where, while loads and unloads run whose effect no reading shows yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from helexa.cortex.picture import Node

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


@dataclass
class Change:
    """Memory that is about to be taken (MB > 0) or given back (MB < 0) on a node, by device."""

    megabytes: Megabytes
    ended_at: float | None = None


@dataclass
class _Page:
    """One node's changes, what was free before the first of them, and what its last reading says."""

    before: Megabytes
    latest: Megabytes
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
        if free is not None:
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
        page, latest = self._pages.get(node.name), reading(node)
        if page is None or latest is None or node.read_at is None:
            return
        page.latest = latest
        ends = [change.ended_at for change in page.changes]
        if all(end is not None and node.read_at >= end + READING_LAG_SECS for end in ends):
            del self._pages[node.name]

    def free(self) -> dict[str, Megabytes]:
        """Free MB by device of the nodes that have changes."""
        return {name: _after(page) for name, page in self._pages.items()}


def _after(page: _Page) -> Megabytes:
    free: dict[int, int] = {}
    for index, before in page.before.items():
        sizes = [change.megabytes.get(index, 0) for change in page.changes]
        coming_back = sum(-size for size in sizes if size < 0)
        free[index] = min(before - sum(sizes), page.latest.get(index, 0) + coming_back)
    return free
