"""The page pool: records which KV pages are free, held or shared. The runner owns the tensors with their contents."""


class PagePool:
    """Allocates a fixed number of KV pages of equal size, which sequences take, share and give back.

    A page can be registered under a hash of its contents (see `page_hash`). After its last holder has given it back, a
    registered page keeps its contents and can be shared again. When no empty page is left, `take` evicts the least
    recently used registered page without a holder.

    Args:
        total: number of pages.
        page_size: positions per page.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._empty = list(range(total - 1, -1, -1))
        self._cached: dict[int, None] = {}  # registered pages without a holder, least recently used first
        self._holders = [0] * total
        self._hashes: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Number of pages without a holder, registered or empty. `take` can hand out all of them."""
        return len(self._empty) + len(self._cached)

    def pages_for(self, positions: int) -> int:
        """Return how many pages are needed for `positions` positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages and return their numbers in ascending order. Earlier contents of the pages are lost.

        The caller must check first that `free` is at least `count`.
        """
        assert count <= self.free, f"{count} pages requested, {self.free} free"
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return sorted(pages)

    def give_back(self, pages: list[int]) -> None:
        """Release one sequence's hold on each of its pages, the last page first.

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
        """Register `page` under the hash of its contents, unless another page is registered under this hash."""
        if page_hash not in self._pages:
            self._pages[page_hash] = page
            self._hashes[page] = page_hash

    def forget(self, pages: list[int]) -> None:
        """Unregister pages, which must still have a holder, so that `match` no longer finds them."""
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

    def count_held(self, pages: list[int]) -> int:
        """Return how many of `pages` have a holder. To share a page that has a holder does not reduce `free`."""
        return sum(self._holders[page] > 0 for page in pages)

    def share(self, pages: list[int]) -> None:
        """Add one holder to each of `pages`, which must be registered and may have other holders."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def _evict(self) -> int:
        page = next(iter(self._cached))
        del self._cached[page]
        del self._pages[self._hashes.pop(page)]
        return page
