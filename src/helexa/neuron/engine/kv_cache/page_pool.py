"""The page pool: who holds which page of the KV cache, and what the pages hold. The tensors live with the runner."""


class PagePool:
    """A fixed number of equal pages, handed out, shared and taken back.

    A page may be registered under a hash of what it holds (see `page_hash`). A registered page that nobody holds keeps
    what it has and can be shared again, until it is the least recently used one when a page is asked for.

    Args:
        total: number of pages.
        page_size: positions per page.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._empty = list(range(total - 1, -1, -1))
        self._kept: dict[int, None] = {}  # registered, held by nobody; least recently used first
        self._holders = [0] * total
        self._hashes: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds: those that `take` can hand out."""
        return len(self._empty) + len(self._kept)

    def pages_for(self, positions: int) -> int:
        """Pages needed to hold that many positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages, ascending. What they held is lost. The caller has checked that they are free."""
        assert count <= self.free, f"{count} pages asked, {self.free} free"
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return sorted(pages)

    def give_back(self, pages: list[int]) -> None:
        """Take a sequence's pages back, last first.

        Then the end of a sequence is evicted before its beginning, which more sequences have in common, and the next
        one gets the empty ones in ascending order again.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page was given back twice"
            if self._holders[page]:
                continue
            if page in self._hashes:
                self._kept[page] = None
            else:
                self._empty.append(page)

    def register(self, page: int, page_hash: bytes) -> None:
        """Say what a page holds; of several pages that hold the same, the first one is found by `match`."""
        if page_hash not in self._pages:
            self._pages[page_hash] = page
            self._hashes[page] = page_hash

    def forget(self, pages: list[int]) -> None:
        """Let nobody find these pages any more; they are held."""
        for page in pages:
            page_hash = self._hashes.pop(page, None)
            if page_hash is not None:
                del self._pages[page_hash]

    def match(self, chain: list[bytes]) -> list[int]:
        """The pages registered under the first hashes of `chain`, as far as there are any."""
        pages: list[int] = []
        for page_hash in chain:
            page = self._pages.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def held(self, pages: list[int]) -> int:
        """How many of `pages` somebody holds: sharing them takes nothing from the free ones."""
        return sum(self._holders[page] > 0 for page in pages)

    def share(self, pages: list[int]) -> None:
        """Hold registered pages once more, whether or not somebody holds them."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def _evict(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page]
        del self._pages[self._hashes.pop(page)]
        return page
