"""Window pages: the part of a KV page that layers with a sliding window need.

In a model that has layers with and without a sliding window, a KV page has two parts: one in the caches of the layers
without a window, and one in the caches of the layers with a window, the *window page*. A sequence keeps its KV pages
until it ends, but only the window pages of its latest positions. The caches of the layers with a window are therefore
smaller, and a window page has a number of its own.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def window_pages_needed(window: int, page_size: int, sequences: int, step_tokens: int, drafts: int) -> int:
    """Return how many window pages suffice for any step.

    Args:
        window: largest sliding window of the layers, in positions.
        sequences: maximum number of running sequences.
        step_tokens: maximum number of tokens of a step, without drafts.
        drafts: maximum number of drafts of a sequence.
    """
    # A window that begins within a page lies in one page more than its positions would fill. New positions that begin
    # within a page lie in one page more, too.
    per_sequence = -(-(window - 1) // page_size) + 1 + 1 + -(-drafts // page_size)
    return sequences * per_sequence + -(-step_tokens // page_size)


def first_page_in_window(computed: int, window: int, page_size: int) -> int:
    """Return the index of the first page that a sequence needs from now on.

    The next token of a sequence with `computed` positions reads the last `window` positions, its own included.
    """
    return max(computed - window + 1, 0) // page_size


class WindowPages:
    """Allocates window pages to KV pages.

    A sequence that needs the window page of a KV page is a holder of the window page. A window page without a holder
    stays with its KV page, so that a later sequence can share both. If no window page is empty, `take` reuses
    the least recently used window page without a holder.

    Args:
        total: number of window pages.
        pages: number of KV pages.
        page_size: positions per page.
        window: largest sliding window of the layers, in positions.

    Attributes:
        numbers: int32 [pages], the window page of each KV page; -1 if the KV page has none.
    """

    def __init__(self, total: int, pages: int, page_size: int, window: int) -> None:
        self.total = total
        self.numbers: NDArray[np.int32] = np.full(pages, -1, np.int32)
        self._page_size, self._window = page_size, window
        self._empty = list(range(total - 1, -1, -1))
        self._cached: dict[int, None] = {}  # KV pages whose window page has no holder, the least recently used first
        self._holders = [0] * pages
        # 1 for each KV page with a window page, else 0. The planner reads many entries in each step, which is faster
        # from a bytearray than from a numpy array.
        self.present = bytearray(pages)

    @property
    def free(self) -> int:
        """Number of window pages without a holder, which `take` can allocate."""
        return len(self._empty) + len(self._cached)

    def holds(self, page: int) -> bool:
        """Return whether the KV page has a window page."""
        return self.present[page] == 1

    def first_needed(self, computed: int) -> int:
        """Return the index of the first page that a sequence with `computed` tokens needs."""
        return first_page_in_window(computed, self._window, self._page_size)

    def usable(self, count: int, has_window_page: Callable[[int], bool]) -> int:
        """Return how many of the `count` leading pages a sequence can start with.

        The pages in the window of the next token need their window pages.

        Args:
            has_window_page: returns whether the window page of the page at an index is available.
        """
        index, first = count - 1, self.first_needed(count * self._page_size)
        while index >= first:
            if not has_window_page(index):
                # Every prefix of more than `index` pages has in its window this page, or a later one that also lacks
                # its window page.
                count, first = index, self.first_needed(index * self._page_size)
            index -= 1
        return count

    def slots(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Convert KV slots, numbered by KV page, to slots numbered by window page."""
        return self.numbers[slots // self._page_size] * np.int32(self._page_size) + slots % self._page_size

    def take(self, pages: list[int]) -> None:
        """Allocate a window page with one holder for each of the KV pages `pages`.

        The caller must check before that `free` is at least the number of pages.
        """
        for page in pages:
            if self._empty:
                number = self._empty.pop()
            else:
                unused = next(iter(self._cached))
                del self._cached[unused]
                number = self._detach(unused)
            self.numbers[page], self.present[page] = number, 1
            self._holders[page] = 1

    def share(self, pages: list[int]) -> None:
        """Add a holder to the window page of each of `pages`, which must have one."""
        for page in pages:
            assert self.holds(page), "a page without its window page was shared"
            self._cached.pop(page, None)
            self._holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Remove a holder from the window page of each of `pages`, the last page first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a window page was given back twice"
            if not self._holders[page]:
                self._cached[page] = None

    def drop(self, page: int) -> None:
        """Free the window page, if any, of a KV page that loses its contents."""
        assert not self._holders[page], "the window page of an empty page has a holder"
        if page in self._cached:
            del self._cached[page]
            self._empty.append(self._detach(page))

    def _detach(self, page: int) -> int:
        number = int(self.numbers[page])
        self.numbers[page], self.present[page] = -1, 0
        return number
