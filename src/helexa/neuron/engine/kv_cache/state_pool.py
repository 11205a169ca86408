"""The state pool: allocates slots for the state of recurrent layers. The runner owns the tensors with the states.

A slot holds the current state of a running sequence, or a snapshot. A snapshot is a copy of a sequence's state at the
end of a full KV page. Its key is the hash of this page (see `page_hash`), which depends on the same tokens as the
state. A later prompt with the same beginning continues from the snapshot.

A sequence may start several steps before the step that copies the snapshot to the sequence's slot. The sequence
therefore pins the snapshot's slot. The contents of a pinned slot stay until the sequence unpins the slot.
"""

from collections import Counter, OrderedDict


class StatePool:
    """Allocates state slots. The first `live` slots are for running sequences, the others for snapshots.

    Args:
        live: maximum number of running sequences.
        snapshots: number of snapshot slots. If all are used, a new snapshot replaces the least recently used one.
    """

    def __init__(self, live: int, snapshots: int) -> None:
        self._most_live, self._most_snapshots = live, snapshots
        self._live = list(range(live - 1, -1, -1))
        self._empty = list(range(live + snapshots - 1, live - 1, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, least recently used first
        self._lengths: dict[bytes, int] = {}  # hash -> number of pages up to the snapshot
        self._pins: Counter[int] = Counter()
        self._forgotten: set[int] = set()  # pinned slots whose snapshot has no hash any more

    @property
    def snapshots(self) -> int:
        """Number of snapshots in the pool."""
        return len(self._snapshots)

    @property
    def idle(self) -> bool:
        """Whether no sequence has a slot, no slot is reserved and no slot is pinned."""
        unused_snapshots = len(self._empty) + len(self._snapshots)
        return len(self._live) == self._most_live and unused_snapshots == self._most_snapshots and not self._pins

    def take(self) -> int:
        """Allocate a slot for a sequence that starts to run, and return it.

        There are as many such slots as sequences can run at a time.
        """
        return self._live.pop()

    def give_back(self, slot: int) -> None:
        """Release the slot of a sequence that no longer runs."""
        assert slot not in self._live, "a state slot was given back twice"
        self._live.append(slot)

    def longest(self, chain: list[bytes], pages: int) -> int:
        """Return the number of pages in the longest prefix of a prompt that has a snapshot at its end; 0 if none has.

        The search compares the snapshots, because a prompt may have many more pages than there are snapshots.

        Args:
            chain: hash chain of the prompt (see `page_hash`).
            pages: maximum length of the prefix.
        """
        lengths = self._lengths.items()
        longest = max((length for key, length in lengths if length <= pages and chain[length] == key), default=0)
        if longest:
            self._snapshots.move_to_end(chain[longest])
        return longest

    def pin(self, page_hash: bytes) -> int:
        """Pin the slot of the snapshot for the page with the hash `page_hash`, which must exist. Return the slot.

        Each call of `pin` needs one call of `unpin`.
        """
        slot = self._snapshots[page_hash]
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """Remove one pin of `slot`: a plan contains the copy of the snapshot, or the copy is no longer needed.

        A step that is planned later, or the same step after its copy, may overwrite the slot.
        """
        assert self._pins[slot] > 0, "a snapshot slot was unpinned twice"
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._forgotten:
                self._forgotten.remove(slot)
                self._empty.append(slot)

    def holds(self, page_hash: bytes) -> bool:
        """Return whether the pool has a snapshot for the page with the hash `page_hash`."""
        return page_hash in self._snapshots

    def reserve(self) -> int | None:
        """Reserve a slot in which the next step will save a snapshot; return None if no slot is available.

        If no slot is empty, the least recently used snapshot whose slot is not pinned is dropped.
        """
        if self._empty:
            return self._empty.pop()
        unused = next((page_hash for page_hash, slot in self._snapshots.items() if slot not in self._pins), None)
        if unused is None:
            return None
        del self._lengths[unused]
        return self._snapshots.pop(unused)

    def unreserve(self, slot: int) -> None:
        """Release a slot that `reserve` returned, because the step that should fill it was not computed."""
        self._empty.append(slot)

    def register(self, slot: int, page_hash: bytes, pages: int) -> None:
        """Record that the reserved `slot` now contains the snapshot for the page with the hash `page_hash`.

        If the pool already has a snapshot for this hash, `slot` is released instead.

        Args:
            pages: number of pages of the sequence up to the end of this page.
        """
        if page_hash in self._snapshots:
            self._empty.append(slot)
            self._snapshots.move_to_end(page_hash)
        else:
            self._snapshots[page_hash] = slot
            self._lengths[page_hash] = pages

    def forget(self, page_hash: bytes) -> None:
        """Drop the snapshot for the page with the hash `page_hash`, if there is one."""
        slot = self._snapshots.pop(page_hash, None)
        if slot is None:
            return
        del self._lengths[page_hash]
        if slot in self._pins:
            self._forgotten.add(slot)
        else:
            self._empty.append(slot)
