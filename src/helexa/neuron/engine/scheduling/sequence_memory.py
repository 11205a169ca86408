"""Memory: what each sequence holds of the KV cache and of the slots for recurrent state, and what is found in them.

A full page is registered as soon as it is computed; a snapshot of recurrent state is taken where a prompt that begins
alike is likely to go on (see `pages` and `states`).
"""

from collections.abc import Iterable

from helexa.neuron.engine.ipc.messages import PrefixReuse
from helexa.neuron.engine.kv_cache import page_hash
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence

_APART = 2048  # positions between snapshots within a prompt


class Memory:
    """The pools, as sequences use them.

    Args:
        states: where the model has recurrent layers.
        reuse: whose prompts share pages; here it matters whether it is `off`.
    """

    def __init__(self, pages: PagePool, states: StatePool | None, reuse: PrefixReuse) -> None:
        self._pages = pages
        self._states = states
        self._reuses = reuse != "off"

    def computed_before(self, sequence: Sequence) -> list[int]:
        """Pages that hold the beginning of `sequence`; its last token is left to be computed, for its logits.

        A sequence that is to be embedded or scored is computed whole: pages hold no hidden states.
        """
        if not self._reuses or sequence.pooled is not None or sequence.request.prompt_logprobs is not None:
            return []
        full = (len(sequence.tokens) - 1) // self._pages.page_size
        page_hash.extend(sequence.chain, sequence.tokens, full, self._pages.page_size)
        pages = self._pages.match(sequence.chain[1 : full + 1])
        if self._states is not None:
            count, sequence.restore = self._states.longest(sequence.chain[1 : len(pages) + 1])
            return pages[:count]
        return pages

    def missing(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence that has not started would have to be computed."""
        return len(sequence.tokens) - len(self.computed_before(sequence)) * self._pages.page_size

    def has_room(self, sequence: Sequence, prefix: list[int], running: Iterable[Sequence]) -> bool:
        """Whether a sequence can begin with `prefix`: not with pages that one of those that run was begun for."""
        promised = sum(max(self._needed(one) - len(one.pages), 0) for one in running)
        return self._needed(sequence) - self._pages.held(prefix) <= self._pages.free - promised

    def begin(self, sequence: Sequence, prefix: list[int]) -> None:
        """Let a sequence hold what is computed of it already."""
        if self._states is not None:
            sequence.slot = self._states.take()
        self._pages.share(prefix)
        sequence.pages = prefix
        sequence.computed = len(prefix) * self._pages.page_size

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Take the pages for `count` tokens more; False if there are too few."""
        missing = self._pages.pages_for(sequence.computed + count) - len(sequence.pages)
        if missing > self._pages.free:
            return False
        sequence.pages += self._pages.take(max(missing, 0))
        return True

    def advance(self, sequence: Sequence, count: int) -> None:
        """Count tokens as computed, and register the pages that this has filled."""
        filled = sequence.computed // self._pages.page_size
        sequence.computed += count
        full = sequence.computed // self._pages.page_size
        if full > filled and self._reuses:
            page_hash.extend(sequence.chain, sequence.tokens, full, self._pages.page_size)
            for page in range(filled, full):
                self._pages.register(sequence.pages[page], sequence.chain[page + 1])

    def release(self, sequence: Sequence) -> None:
        """Take everything back; what is registered can still be found."""
        self._pages.give_back(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.fresh = 0
        sequence.restore = None
        if self._states is not None and sequence.slot is not None:
            self._states.give_back(sequence.slot)
            sequence.slot = None

    def discard(self, sequence: Sequence) -> list[int]:
        """Take everything back, to be found by nobody; the pages that no other sequence holds."""
        pages = sequence.pages
        self._pages.forget(pages)
        if self._states is not None:
            for page in sequence.chain:
                self._states.forget(page)
        self.release(sequence)
        return [page for page in pages if not self._pages.held([page])]  # the others' beginnings are sound

    def until_mark(self, sequence: Sequence, count: int) -> int:
        """So many of the next `count` tokens of a prompt that a step ends where a snapshot is worth it."""
        if self._states is None or sequence.decoding:
            return count
        return min(count, self._next_mark(sequence) - sequence.computed)

    def place_for_snapshot(self, sequence: Sequence, end: int) -> int | None:
        """A slot for the state at position `end`, at marks of a prompt and wherever output fills a page."""
        if self._states is None or end % self._pages.page_size:
            return None
        if not sequence.decoding and end != self._next_mark(sequence):
            return None
        if sequence.tokens[end - 1] >= 0:  # else what the page will hold is not known yet
            page = end // self._pages.page_size
            page_hash.extend(sequence.chain, sequence.tokens, page, self._pages.page_size)
            if self._states.holds(sequence.chain[page]):
                return None
        return self._states.reserve()

    def take_snapshot(self, entry: PlanEntry) -> None:
        """Remember what a step has saved; of a sequence that decodes, only its latest is kept."""
        if self._states is None or entry.save is None:
            return
        sequence, size = entry.sequence, self._pages.page_size
        count = (sequence.computed + entry.count) // size
        page_hash.extend(sequence.chain, sequence.tokens, count, size)
        page = sequence.chain[count]
        self._states.register(entry.save, page)
        if entry.decoding:
            if sequence.follower is not None:
                self._states.forget(sequence.follower)
            sequence.follower = page

    def unreserve(self, save: int | None) -> None:
        """A step that was to save a snapshot there has failed."""
        if self._states is not None and save is not None:
            self._states.unreserve(save)

    def _next_mark(self, sequence: Sequence) -> int:
        """The next position at which a prompt's state is worth a snapshot; a step ends there.

        That is the end of its last full page, where its next turn goes on; the end of the last one before its last
        turn, which may be said anew; and every now and then between.
        """
        size, at = self._pages.page_size, sequence.computed
        request = sequence.request
        ends = ((len(request.prompt) - 1) // size * size, request.turn // size * size, (at // _APART + 1) * _APART)
        return min(end for end in ends if end > at)

    def _needed(self, sequence: Sequence) -> int:
        """Pages for all that is known of it and one token more; with fewer it would be preempted before its first."""
        return self._pages.pages_for(len(sequence.tokens) + 1)
