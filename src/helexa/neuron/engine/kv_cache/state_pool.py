"""The state pool: slots for the state of recurrent layers, and which of them hold snapshots.

The tensors live with the runner.

A snapshot is a copy of a state at the end of a full page, known by that page's hash (see `page_hash`), which says
everything that the state depends on. Prompts that begin alike go on from it.
"""

from collections import OrderedDict


class StatePool:
    """Slots by number: first those for sequences that run, behind them those for snapshots.

    Args:
        live: sequences that may run.
        snapshots: snapshots that are kept, the least recently used forgotten first.
    """

    def __init__(self, live: int, snapshots: int) -> None:
        self._live = list(range(live - 1, -1, -1))
        self._empty = list(range(live + snapshots - 1, live - 1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, least recently used first

    @property
    def snapshots(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def take(self) -> int:
        """A slot for a sequence; there is one for each that may run."""
        return self._live.pop()

    def give_back(self, slot: int) -> None:
        """Take a sequence's slot back."""
        assert slot not in self._live, "a state slot was given back twice"
        self._live.append(slot)

    def longest(self, hashes: list[bytes]) -> tuple[int, int | None]:
        """How many of the pages with these hashes, from the first on, end at a snapshot, and its slot."""
        for count in range(len(hashes), 0, -1):
            slot = self._kept.get(hashes[count - 1])
            if slot is not None:
                self._kept.move_to_end(hashes[count - 1])
                return count, slot
        return 0, None

    def holds(self, page_hash: bytes) -> bool:
        """Whether there is a snapshot at the end of the page with this hash."""
        return page_hash in self._kept

    def reserve(self) -> int | None:
        """A slot for a snapshot to be taken in the next step, at the cost of the oldest; None if there is none."""
        if self._empty:
            return self._empty.pop()
        return self._kept.popitem(last=False)[1] if self._kept else None

    def unreserve(self, slot: int) -> None:
        """Take back a reserved slot: the step did not happen."""
        self._empty.append(slot)

    def register(self, slot: int, page_hash: bytes) -> None:
        """Say what a reserved slot holds now; of several that hold the same, one is kept."""
        if page_hash in self._kept:
            self._empty.append(slot)
            self._kept.move_to_end(page_hash)
        else:
            self._kept[page_hash] = slot

    def forget(self, page_hash: bytes) -> None:
        """Give up a snapshot, if it is still there."""
        slot = self._kept.pop(page_hash, None)
        if slot is not None:
            self._empty.append(slot)
