"""The state pool: allocates slots for the state of recurrent layers. The runner owns the tensors with the states.

A slot holds the current state of a running sequence, or a snapshot. A snapshot is a copy of a sequence's state at the
end of a full KV page. Its key is the hash of this page (see `page_hash`), which depends on the same tokens as the
state. A later prompt with the same beginning continues from the snapshot.
"""

from collections import OrderedDict


class StatePool:
    """Allocates state slots. The first `live` slots are for running sequences, the others for snapshots.

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
        """Allocate a slot for a sequence that starts to run, and return it.

        There are as many such slots as sequences can run at a time.
        """
        return self._live.pop()

    def give_back(self, slot: int) -> None:
        """Release the slot of a sequence that no longer runs."""
        assert slot not in self._live, "a state slot was given back twice"
        self._live.append(slot)

    def longest(self, hashes: list[bytes]) -> tuple[int, int | None]:
        """Find the longest prefix of a prompt that has a snapshot at its end.

        Args:
            hashes: hashes of the prompt's leading pages.

        Returns:
            The number of pages in the prefix and the slot of the snapshot; (0, None) if there is no such prefix.
        """
        for count in range(len(hashes), 0, -1):
            slot = self._snapshots.get(hashes[count - 1])
            if slot is not None:
                self._snapshots.move_to_end(hashes[count - 1])
                return count, slot
        return 0, None

    def holds(self, page_hash: bytes) -> bool:
        """Return whether the pool has a snapshot for the page with the hash `page_hash`."""
        return page_hash in self._snapshots

    def reserve(self) -> int | None:
        """Reserve a slot in which the next step will save a snapshot; return None if no slot is available.

        If no slot is empty, the least recently used snapshot is dropped.
        """
        if self._empty:
            return self._empty.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None

    def unreserve(self, slot: int) -> None:
        """Release a slot that `reserve` returned, because the step that should fill it was not computed."""
        self._empty.append(slot)

    def register(self, slot: int, page_hash: bytes) -> None:
        """Record that the reserved `slot` now contains the snapshot for the page with the hash `page_hash`.

        If the pool already has a snapshot for this hash, `slot` is released instead.
        """
        if page_hash in self._snapshots:
            self._empty.append(slot)
            self._snapshots.move_to_end(page_hash)
        else:
            self._snapshots[page_hash] = slot

    def forget(self, page_hash: bytes) -> None:
        """Drop the snapshot for the page with the hash `page_hash`, if there is one."""
        slot = self._snapshots.pop(page_hash, None)
        if slot is not None:
            self._empty.append(slot)
