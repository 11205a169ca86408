"""The page pool: which pages of the KV cache are free. Knows numbers only; the tensors live with the runner."""


class PagePool:
    """A fixed number of equal pages, handed out and taken back.

    Args:
        total: number of pages.
        page_size: positions per page.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        """Pages needed to hold that many positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages. The caller has checked that they are free."""
        assert count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Take pages back, last first, so that the next sequence gets them in ascending order again."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.total, "a page was given back twice"
