"""The page pool: records which KV pages are free, in use or shared. The runner owns the tensors with K and V."""


class PagePool:
    """Allocates KV pages to sequences. A sequence that uses a page is a holder of the page, and pages can be shared.

    A page can be registered under a hash of its contents (see `page_hash`). If a registered page has no holder left, it
    keeps its contents, and a later sequence can share it. If no empty page is left, `take` evicts the least recently
    used registered page without a holder.

    Args:
        total: number of pages.
        page_size: positions per page.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._empty = list(range(total - 1, -1, -1))
        self._cached: dict[int, None] = {}  # registered pages without a holder, the least recently used first
        self._holders = [0] * total
        self._hashes: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Number of pages without a holder, which `take` can allocate. They are empty, or registered and evictable."""
        return len(self._empty) + len(self._cached)

    def pages_for(self, positions: int) -> int:
        """Return how many pages are needed for `positions` positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages with one holder each, and return their numbers in ascending order.

        Earlier contents of the pages are lost. The caller must check before that `free` is at least `count`.
        """
        assert count <= self.free, f"{count} pages requested, {self.free} free"
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return sorted(pages)

    def give_back(self, pages: list[int]) -> None:
        """Remove one holder from each of `pages`, which are the pages of one sequence. The last page is released first.

        This order has two effects. The end of a sequence is evicted before its beginning, which other sequences are
        more likely to share. The next sequence gets empty pages in ascending order.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page was given back twice"
            if self._holders[page]:
                continue
            if page in self._hashes:
                self._cached[page] = None
            else:
                self._empty.append(page)

    def register(self, page: int, page_hash: bytes) -> None:
        """Register `page` under `page_hash`, so that `match` finds it. Do nothing if another page has this hash."""
        if page_hash not in self._pages:
            self._pages[page_hash] = page
            self._hashes[page] = page_hash

    def forget(self, pages: list[int]) -> None:
        """Unregister `pages`, so that `match` no longer finds them. The pages must still have a holder."""
        for page in pages:
            page_hash = self._hashes.pop(page, None)
            if page_hash is not None:
                del self._pages[page_hash]

    def match(self, chain: list[bytes]) -> list[int]:
        """Return the pages registered under the hashes of `chain`, in order, up to the first hash without a page."""
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

    def is_held(self, page_hash: bytes) -> bool:
        """Return whether a page is registered under `page_hash` and has a holder."""
        page = self._pages.get(page_hash)
        return page is not None and self._holders[page] > 0

    def count_held(self, pages: list[int]) -> int:
        """Return how many of `pages` have a holder. Sharing such a page does not reduce `free`."""
        return sum(self._holders[page] > 0 for page in pages)

    def share(self, pages: list[int]) -> None:
        """Add one holder to each of `pages`. The pages must be registered, and may already have holders."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def _evict(self) -> int:
        page = next(iter(self._cached))
        del self._cached[page]
        del self._pages[self._hashes.pop(page)]
        return page
