"""The state pool: slots for the state of recurrent layers, and the snapshots in them. The runner owns the tensors.

A snapshot is a copy of a sequence's state at the end of a full page. Its key is the hash of this page (see
`page_hash`), which covers every token that the state depends on. A prompt with the same beginning continues from the
snapshot.
"""

from collections import OrderedDict


class StatePool:
    """State slots by number: first the slots of running sequences, then the slots of snapshots.

    Args:
        live: number of sequences that can run at a time.
        snapshots: number of snapshot slots; the least recently used snapshot is replaced first.
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
        """Return a slot for a sequence. There is a slot for each sequence that can run."""
        return self._live.pop()

    def give_back(self, slot: int) -> None:
        """Release a sequence's slot."""
        assert slot not in self._live, "a state slot was given back twice"
        self._live.append(slot)

    def longest(self, hashes: list[bytes]) -> tuple[int, int | None]:
        """Find the longest prefix of pages that ends at a snapshot.

        Args:
            hashes: hashes of a prompt's leading pages.

        Returns:
            The number of pages in the prefix and the slot of the snapshot; (0, None) without a snapshot.
        """
        for count in range(len(hashes), 0, -1):
            slot = self._snapshots.get(hashes[count - 1])
            if slot is not None:
                self._snapshots.move_to_end(hashes[count - 1])
                return count, slot
        return 0, None

    def holds(self, page_hash: bytes) -> bool:
        """Return whether there is a snapshot at the end of the page with this hash."""
        return page_hash in self._snapshots

    def reserve(self) -> int | None:
        """Return a slot for a snapshot that the next step takes, or None if the pool has no snapshot slots.

        Without an empty slot, the least recently used snapshot is dropped.
        """
        if self._empty:
            return self._empty.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None

    def unreserve(self, slot: int) -> None:
        """Release a reserved slot whose step was not computed."""
        self._empty.append(slot)

    def register(self, slot: int, page_hash: bytes) -> None:
        """Record that a reserved slot holds the snapshot for `page_hash`.

        If a snapshot with this hash exists already, it stays and the new slot is released.
        """
        if page_hash in self._snapshots:
            self._empty.append(slot)
            self._snapshots.move_to_end(page_hash)
        else:
            self._snapshots[page_hash] = slot

    def forget(self, page_hash: bytes) -> None:
        """Drop the snapshot with this hash, if there is one."""
        slot = self._snapshots.pop(page_hash, None)
        if slot is not None:
            self._empty.append(slot)
