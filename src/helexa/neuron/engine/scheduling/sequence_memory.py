"""Allocates KV pages and state slots for sequences, and finds cached prefixes.

A full page is registered for reuse as soon as it is computed. A snapshot of recurrent state is taken at positions where
a later prompt is likely to continue (see `page_pool` and `state_pool`).
"""

from collections.abc import Iterable

from helexa.neuron.engine.ipc.messages import PrefixReuse
from helexa.neuron.engine.kv_cache import page_hash
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence

_SNAPSHOT_INTERVAL = 2048  # positions between snapshots within a prompt


class Memory:
    """Allocates pages from the page pool and slots from the state pool for sequences.

    Args:
        states: the state pool; None for a model without recurrent layers.
        reuse: which prompts share pages (see `EngineOptions`). For this class, all values but `off` mean the same.
    """

    def __init__(self, pages: PagePool, states: StatePool | None, reuse: PrefixReuse) -> None:
        self._pages = pages
        self._states = states
        self._reuses = reuse != "off"

    def computed_before(self, sequence: Sequence) -> list[int]:
        """Return the cached pages that hold the beginning of `sequence`, without the page of its last token.

        The last token is always computed, because its logits are needed. The result is empty for a sequence that needs
        hidden states of its prompt (for an embedding or prompt log-probabilities), because pages do not hold them.
        """
        if not self._reuses or sequence.pooled is not None or sequence.request.prompt_logprobs is not None:
            return []
        full_pages = (len(sequence.tokens) - 1) // self._pages.page_size
        page_hash.extend(sequence.chain, sequence.tokens, full_pages, self._pages.page_size)
        pages = self._pages.match(sequence.chain[1 : full_pages + 1])
        if self._states is not None:
            count, sequence.restore = self._states.longest(sequence.chain[1 : len(pages) + 1])
            return pages[:count]
        return pages

    def missing(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting sequence must be computed, without those in cached pages."""
        return len(sequence.tokens) - len(self.computed_before(sequence)) * self._pages.page_size

    def has_room(self, sequence: Sequence, prefix: list[int], running: Iterable[Sequence]) -> bool:
        """Return whether enough pages are free to start a sequence with the cached pages `prefix`.

        Free pages that the `running` sequences still need for their tokens do not count as free.
        """
        reserved = sum(max(self._needed(other) - len(other.pages), 0) for other in running)
        return self._needed(sequence) - self._pages.count_held(prefix) <= self._pages.free - reserved

    def begin(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a sequence that starts the cached pages `prefix`, and a state slot if the model needs one."""
        if self._states is not None:
            sequence.slot = self._states.take()
        self._pages.share(prefix)
        sequence.pages = prefix
        sequence.computed = len(prefix) * self._pages.page_size

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Give a sequence pages for its next `count` tokens; return False if too few pages are free."""
        missing = self._pages.pages_for(sequence.computed + count) - len(sequence.pages)
        if missing > self._pages.free:
            return False
        sequence.pages += self._pages.take(max(missing, 0))
        return True

    def advance(self, sequence: Sequence, count: int) -> None:
        """Record that the next `count` tokens of a sequence are computed, and register the pages that they fill."""
        registered_pages = sequence.computed // self._pages.page_size
        sequence.computed += count
        full_pages = sequence.computed // self._pages.page_size
        if full_pages > registered_pages and self._reuses:
            page_hash.extend(sequence.chain, sequence.tokens, full_pages, self._pages.page_size)
            for index in range(registered_pages, full_pages):
                self._pages.register(sequence.pages[index], sequence.chain[index + 1])

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's pages and state slot. Registered pages stay available for prefix reuse."""
        self._pages.give_back(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.fresh = 0
        sequence.restore = None
        if self._states is not None and sequence.slot is not None:
            self._states.give_back(sequence.slot)
            sequence.slot = None

    def discard(self, sequence: Sequence) -> list[int]:
        """Release a sequence's pages and state slot, and unregister its pages and snapshots.

        Returns:
            The released pages that no other sequence holds.
        """
        pages = sequence.pages
        self._pages.forget(pages)
        if self._states is not None:
            for hash_of_page in sequence.chain:
                self._states.forget(hash_of_page)
        self.release(sequence)
        return [page for page in pages if not self._pages.count_held([page])]  # shared pages have finite values

    def until_mark(self, sequence: Sequence, count: int) -> int:
        """Return `count`, reduced if necessary so that a prefill step does not pass the next snapshot position."""
        if self._states is None or sequence.decoding:
            return count
        return min(count, self._next_mark(sequence) - sequence.computed)

    def place_for_snapshot(self, sequence: Sequence, end: int) -> int | None:
        """Reserve a slot for a snapshot at position `end`; return None if no snapshot is to be taken there.

        Snapshots are taken in a prompt at the positions of `_next_mark`, and in the output at the end of each page.
        """
        if self._states is None or end % self._pages.page_size:
            return None
        if not sequence.decoding and end != self._next_mark(sequence):
            return None
        if sequence.tokens[end - 1] >= 0:  # otherwise the token, and so the page hash, is not known yet
            page = end // self._pages.page_size
            page_hash.extend(sequence.chain, sequence.tokens, page, self._pages.page_size)
            if self._states.holds(sequence.chain[page]):
                return None
        return self._states.reserve()

    def take_snapshot(self, entry: PlanEntry) -> None:
        """Register the snapshot that a step has saved, if it has. Of a decoding sequence, only the latest is kept."""
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
        """Release the snapshot slot `save`, if not None, because the step that was to fill it was not computed."""
        if self._states is not None and save is not None:
            self._states.unreserve(save)

    def _next_mark(self, sequence: Sequence) -> int:
        """Return the next position of a prompt at which a snapshot is taken. A step must end there.

        The positions with a snapshot are:

        * the end of the prompt's last full page, because the next turn of the conversation continues near this position
        * the end of the last full page before the conversation's last turn, which the client may replace
        * every multiple of `_SNAPSHOT_INTERVAL`
        """
        page_size, position = self._pages.page_size, sequence.computed
        request = sequence.request
        ends = (
            (len(request.prompt) - 1) // page_size * page_size,
            request.turn // page_size * page_size,
            (position // _SNAPSHOT_INTERVAL + 1) * _SNAPSHOT_INTERVAL,
        )
        return min(end for end in ends if end > position)

    def _needed(self, sequence: Sequence) -> int:
        """Return the number of pages for all tokens of the sequence and one more token.

        With fewer pages, the sequence would be preempted before its next output token.
        """
        return self._pages.pages_for(len(sequence.tokens) + 1)
