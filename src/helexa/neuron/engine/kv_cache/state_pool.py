"""The state pool: allocates slots for the state of recurrent layers. The runner owns the tensors with the states.

A slot holds the current state of a running sequence, or a snapshot. A snapshot is a copy of a sequence's state at the
end of a full KV page. Its key is the hash of this page (see `page_hash`), which covers every token that the state
depends on. A later prompt with the same beginning continues from the snapshot.
"""

from collections import OrderedDict


class StatePool:
    """Allocates state slots, which are numbered: first the slots of running sequences, then the slots of snapshots.

    Args:
        live: maximum number of running sequences.
        snapshots: number of snapshot slots. If all are used, a new snapshot replaces the least recently used one.
    """

    def __init__(self, live: int, snapshots: int) -> None:
        self._live = list(range(live - 1, -1, -1))
        self._empty = list(range(live + snapshots - 1, live - 1, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, least recently used first

    @property
    def snapshots(self) -> int:
        """Number of snapshots in the pool."""
        return len(self._snapshots)

    def take(self) -> int:
        """Allocate a slot for a sequence that starts to run. There are as many slots as sequences can run at a time."""
        return self._live.pop()

    def give_back(self, slot: int) -> None:
        """Release a sequence's slot."""
        assert slot not in self._live, "a state slot was given back twice"
        self._live.append(slot)

    def longest(self, hashes: list[bytes]) -> tuple[int, int | None]:
        """Find the last of a prompt's leading pages that has a snapshot at its end.

        Args:
            hashes: hashes of the prompt's leading pages.

        Returns:
            The number of pages up to the snapshot and the slot of the snapshot; (0, None) if no page has a snapshot.
        """
        for count in range(len(hashes), 0, -1):
            slot = self._snapshots.get(hashes[count - 1])
            if slot is not None:
                self._snapshots.move_to_end(hashes[count - 1])
                return count, slot
        return 0, None

    def holds(self, page_hash: bytes) -> bool:
        """Return whether the pool has a snapshot for the page with this hash."""
        return page_hash in self._snapshots

    def reserve(self) -> int | None:
        """Reserve a slot for a snapshot that the next step saves; return None if the pool has no snapshot slots.

        If no slot is empty, the least recently used snapshot is dropped.
        """
        if self._empty:
            return self._empty.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None

    def unreserve(self, slot: int) -> None:
        """Release a reserved snapshot slot, because the step that was to save the snapshot was not computed."""
        self._empty.append(slot)

    def register(self, slot: int, page_hash: bytes) -> None:
        """Record that the reserved `slot` now holds the snapshot for the page with the hash `page_hash`.

        If the pool has another snapshot for this hash already, `slot` is released instead.
        """
        if page_hash in self._snapshots:
            self._empty.append(slot)
            self._snapshots.move_to_end(page_hash)
        else:
            self._snapshots[page_hash] = slot

    def forget(self, page_hash: bytes) -> None:
        """Drop the snapshot for the page with this hash, if there is one."""
        slot = self._snapshots.pop(page_hash, None)
        if slot is not None:
            self._empty.append(slot)
