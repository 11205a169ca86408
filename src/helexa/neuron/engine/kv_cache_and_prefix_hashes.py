"""Bookkeeping of the KV cache: pages of K and V, and slots of recurrent state.

The runner owns the tensors; this module decides which sequence uses which part of them.

**Pages.** A full page is registered under a hash, so that later prompts with the same prefix find it (prefix cache).
The hash of a page is computed from the hash of the previous page, the tokens of the page and the images to which these
tokens belong. It therefore depends on every token and image up to the end of the page. K and V of a position depend
only on these tokens and images. Two pages with the same hash therefore have the same contents. The hash chain of a
sequence starts from a salt, so sequences with different salts share no pages. The hash does not include the model,
because an engine process serves only one model.

**State slots.** A slot holds the current state of a running sequence in the recurrent layers, or a snapshot. A snapshot
is a copy of a sequence's state at the end of a full KV page. Its key is the hash of this page, which depends on the
same tokens as the state. A later prompt with the same beginning continues from the snapshot. A sequence may start
several steps before the step that copies the snapshot to the sequence's slot. The sequence therefore pins the
snapshot's slot. The contents of a pinned slot stay until the sequence unpins the slot.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal

from helexa.neuron.engine.window_page_pool import WindowPages

# A KV page without its window page, a window page, or the recurrent state of a slot.
CacheKind = Literal["page", "window", "state"]

_BYTES = 16


# Function that returns bytes that identify the image tokens in [start, stop); empty if there are none.
ImageKey = Callable[[int, int], bytes]


def new_chain(salt: str) -> list[bytes]:
    """Return a new hash chain, whose only entry is the hash of `salt`."""
    return [blake2b(salt.encode(), digest_size=_BYTES).digest()]


def extend_chain(
    chain: list[bytes], tokens: list[int], pages: int, page_size: int, image_key: ImageKey | None = None
) -> None:
    """Append page hashes to a sequence's hash chain until it covers `pages` pages.

    Args:
        chain: the hash of the salt (see `new_chain`), then the hashes of the first pages of the sequence.
        page_size: number of tokens per page.
        image_key: key of the images of the sequence; None without images.
    """
    for start in range((len(chain) - 1) * page_size, pages * page_size, page_size):
        digest = blake2b(chain[-1], digest_size=_BYTES)
        digest.update(array("I", tokens[start : start + page_size]))
        if image_key is not None:
            digest.update(image_key(start, start + page_size))
        chain.append(digest.digest())


class PagePool:
    """Allocates KV pages to sequences.

    A sequence that uses a page is a holder of the page, and pages can be shared. A page can be registered under a hash
    of its contents (see `extend_chain`). If a registered page has no holder left, it keeps its contents, and a later
    sequence can share it. If no empty page is left, `take` evicts the least recently used registered page without a
    holder.
    """

    def __init__(self, total: int, page_size: int, windows: WindowPages | None = None) -> None:
        self.total = total
        self.page_size = page_size  # positions per page
        self.windows = windows  # the window pages; None if all layers have the same pages
        self.drafted: set[int] = set()  # the pages whose K and V a draft model has computed, too (see `draft_length`)
        self._empty = list(range(total - 1, -1, -1))
        self._cached: dict[int, None] = {}  # registered pages without a holder, the least recently used first
        self._holders = [0] * total
        self._hashes: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Number of pages that `take` can allocate: empty, or registered without a holder."""
        return len(self._empty) + len(self._cached)

    def pages_for(self, positions: int) -> int:
        """Return how many pages are needed for `positions` positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages with one holder each; return them in ascending order.

        The contents of the pages are undefined. The caller must check before that `free` is at least `count`.
        """
        assert count <= self.free, f"{count} pages requested, {self.free} free"
        # Empty pages first, so that cached prompts stay as long as possible.
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        self.drafted.difference_update(pages)
        # Attention in plain torch reads ascending adjacent pages without a copy.
        return sorted(pages)

    def give_back(self, pages: list[int]) -> None:
        """Remove one holder from each of `pages`, which are the pages of one sequence."""
        # The last page first: the end of a sequence is then evicted before its beginning, which other sequences are
        # more likely to share. `take` allocates the empty pages in their old order again, because `_empty` is a stack.
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page was given back twice"
            if self._holders[page]:
                continue
            if page in self._hashes:
                self._cached[page] = None
            else:
                self._add_empty(page)

    def register(self, page: int, page_hash: bytes) -> None:
        """Register `page` under `page_hash`, unless another page has this hash.

        If `page` has a window page and the other page has none, `page` replaces the other page.
        """
        windows, other = self.windows, self._pages.get(page_hash)
        if other is not None and windows is not None and windows.holds(page) and not windows.holds(other):
            self.drop(page_hash)  # otherwise no sequence could start after this page until the other page is evicted
        # Two sequences may compute the same page in one step. The second page stays unregistered.
        if page_hash not in self._pages:
            self._pages[page_hash] = page
            self._hashes[page] = page_hash

    def forget(self, pages: list[int]) -> None:
        """Unregister `pages`, which must still have a holder."""
        for page in pages:
            page_hash = self._hashes.pop(page, None)
            if page_hash is not None:
                del self._pages[page_hash]

    def clear(self) -> None:
        """Unregister all pages. Pages without a holder are then empty."""
        cached, self._cached = list(self._cached), {}
        self._hashes.clear()
        self._pages.clear()
        for page in cached:
            self._add_empty(page)

    def drop(self, page_hash: bytes) -> list[int]:
        """Unregister the page with `page_hash`; return [page] if it is empty now, else []."""
        page = self._pages.get(page_hash)
        if page is None:
            return []
        self.forget([page])
        if self._holders[page]:
            return []
        del self._cached[page]
        self._add_empty(page)
        return [page]

    def match(self, chain: list[bytes]) -> list[int]:
        """Return the pages of the page hashes `chain`, up to the first unknown hash."""
        pages: list[int] = []
        for page_hash in chain:
            page = self._pages.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def holds(self, page_hash: bytes) -> bool:
        """Return whether a page is registered under `page_hash`."""
        return page_hash in self._pages

    def page_of(self, page_hash: bytes) -> int | None:
        """Return the page that is registered under `page_hash`; None if there is none."""
        return self._pages.get(page_hash)

    def is_held(self, page_hash: bytes) -> bool:
        """Return whether a page is registered under `page_hash` and has a holder."""
        page = self._pages.get(page_hash)
        return page is not None and self._holders[page] > 0

    def count_held(self, pages: list[int]) -> int:
        """Return how many of `pages` have a holder. Sharing these does not reduce `free`."""
        return sum(self._holders[page] > 0 for page in pages)

    def has_window_page(self, page_hash: bytes) -> bool:
        """Return whether the page registered under `page_hash` has a window page."""
        page = self._pages.get(page_hash)
        return page is not None and self.windows is not None and self.windows.holds(page)

    def parts(self, page: int) -> list[int]:
        """Return the numbers under which the runner's caches store the parts of a KV page.

        The first part has the number of the KV page itself. If the KV page has a window page (see `WindowPages`), the
        second part has the number `total` plus the number of the window page.
        """
        if self.windows is None or not self.windows.holds(page):
            return [page]
        return [page, self.total + int(self.windows.numbers[page])]

    def share(self, pages: list[int]) -> None:
        """Add one holder to each of `pages`, which must be registered."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def _evict(self) -> int:
        page = next(iter(self._cached))
        del self._cached[page]
        del self._pages[self._hashes.pop(page)]
        if self.windows is not None:
            self.windows.drop(page)
        return page

    def _add_empty(self, page: int) -> None:
        self._empty.append(page)
        if self.windows is not None:
            self.windows.drop(page)


class StatePool:
    """Allocates state slots: `live` slots for sequences, `snapshots` for snapshots."""

    def __init__(self, live: int, snapshots: int) -> None:
        self._most_live, self._most_snapshots = live, snapshots
        self._live = list(range(live - 1, -1, -1))
        self._empty = list(range(live + snapshots - 1, live - 1, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, least recently used first
        self._lengths: dict[bytes, int] = {}  # hash -> number of pages up to the snapshot
        self._pins: Counter[int] = Counter()
        self._forgotten: set[int] = set()  # pinned slots whose snapshot was dropped

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
        """Return a free slot for a sequence that starts to run."""
        # `_live` is not empty here, because there are as many slots as sequences can run at a time.
        return self._live.pop()

    def give_back(self, slot: int) -> None:
        """Release the slot of a sequence that no longer runs."""
        assert slot not in self._live, "a state slot was given back twice"
        self._live.append(slot)

    def longest(self, chain: list[bytes], pages: int) -> int:
        """Return the page count of the longest prefix that ends with a snapshot, or 0.

        Args:
            chain: hash chain of the prompt (see `extend_chain`).
            pages: maximum length of the prefix.
        """
        # The planner calls this for each waiting prompt in each step. The shorter of two loops runs: over the pages of
        # the prompt, or over the snapshots, of which there may be thousands.
        if pages <= len(self._lengths):
            longest = next((length for length in range(pages, 0, -1) if chain[length] in self._snapshots), 0)
        else:
            lengths = self._lengths.items()
            longest = max((length for key, length in lengths if length <= pages and chain[length] == key), default=0)
        if longest:
            self._snapshots.move_to_end(chain[longest])
        return longest

    def pin(self, page_hash: bytes) -> int:
        """Pin the snapshot of the page with the hash `page_hash`, and return its slot."""
        slot = self._snapshots[page_hash]
        # Pins are counted, because several sequences may start from the same snapshot.
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """Remove one pin of `slot`, once the copy from it is planned or no longer needed.

        Later steps, and snapshots that the same step saves after the copy, may then overwrite the slot.
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
        """Reserve a slot for the next step's snapshot; None if no slot is available."""
        if self._empty:
            return self._empty.pop()
        # Without an empty slot, drop the least recently used snapshot that no sequence still has to copy.
        unused = next((page_hash for page_hash, slot in self._snapshots.items() if slot not in self._pins), None)
        if unused is None:
            return None
        del self._lengths[unused]
        return self._snapshots.pop(unused)

    def unreserve(self, slot: int) -> None:
        """Release a reserved slot whose step was not computed."""
        self._empty.append(slot)

    def register(self, slot: int, page_hash: bytes, pages: int) -> None:
        """Record that the reserved `slot` contains the snapshot for `page_hash`.

        Args:
            pages: number of pages of the sequence, from its beginning to the page with the hash `page_hash`.
        """
        if page_hash in self._snapshots:
            # Two sequences with the same beginning may save the same snapshot in one step.
            self._empty.append(slot)
            self._snapshots.move_to_end(page_hash)
        else:
            self._snapshots[page_hash] = slot
            self._lengths[page_hash] = pages

    def clear(self) -> None:
        """Drop all snapshots."""
        for page_hash in list(self._snapshots):
            self.forget(page_hash)

    def forget(self, page_hash: bytes) -> None:
        """Drop the snapshot for the page with the hash `page_hash`, if there is one."""
        slot = self._snapshots.pop(page_hash, None)
        if slot is None:
            return
        del self._lengths[page_hash]
        if slot in self._pins:
            # A sequence still has to copy the slot. `unpin` releases it.
            self._forgotten.add(slot)
        else:
            self._empty.append(slot)
