"""Allocates KV pages and state slots for sequences, and finds cached prefixes.

A full page is registered for reuse as soon as it is computed. For models with recurrent layers, a snapshot of the state
is taken at positions where a later prompt is likely to continue (see `page_pool` and `state_pool`).
"""

from bisect import bisect_left
from collections.abc import Iterable

from helexa.neuron.engine.ipc.messages import PrefixReuse
from helexa.neuron.engine.kv_cache import page_hash
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence

_SNAPSHOT_INTERVAL = 2048  # positions between snapshots within a prompt
_MAX_NEW_MATCHES = 512  # takes about a millisecond per step, most of it for page hashes


class Memory:
    """Allocates KV pages (from the page pool) and state slots (from the state pool) to sequences.

    Args:
        states: the state pool; None for a model without recurrent layers.
        reuse: which prompts share pages (see `EngineOptions.prefix_reuse`). This class only distinguishes `off` from
            the other values.
    """

    def __init__(self, pages: PagePool, states: StatePool | None, reuse: PrefixReuse) -> None:
        self._pages = pages
        self._states = states
        self._reuses = reuse != "off"

    def computed_before(self, sequence: Sequence) -> list[int]:
        """Return the cached pages that contain the beginning of `sequence`, except the page of its last token.

        The last token is always computed, because its logits are needed. The result is empty if the sequence needs
        hidden states of its whole prompt, for an embedding or prompt log-probabilities. KV pages do not contain hidden
        states.
        """
        if not self._may_reuse(sequence):
            return []
        full_pages = (len(sequence.tokens) - 1) // self._pages.page_size
        pages = self._pages.match(sequence.chain[1 : full_pages + 1])
        while len(pages) == len(sequence.chain) - 1 < full_pages:  # pages after a miss need no hash yet
            self._extend_chain(sequence, len(pages) + 1)
            pages += self._pages.match(sequence.chain[-1:])
        if self._states is not None:
            return pages[: self._states.longest(sequence.chain, len(pages))]
        return pages

    def missing(self, waiting: Iterable[Sequence]) -> dict[Sequence, int]:
        """Return how many tokens of each waiting sequence must be computed, because no cached page contains them.

        The numbers are upper limits for long prompts that have waited only a few steps: each call looks up at most
        `_MAX_NEW_MATCHES` pages that earlier calls have not found.
        """
        missing: dict[Sequence, int] = {}
        budget = _MAX_NEW_MATCHES
        for sequence in waiting:
            known = sequence.matched
            cached = self.cached_pages(sequence, known + budget)
            budget -= max(sequence.matched - known, 0)
            missing[sequence] = len(sequence.tokens) - cached * self._pages.page_size
        return missing

    def cached_pages(self, sequence: Sequence, limit: int | None = None) -> int:
        """Return the length of `computed_before(sequence)`, without a walk over all of its pages.

        The number is exact if the cached pages of the sequence are its first pages. This is nearly always the case,
        because pages at the end of a sequence are evicted first.

        Args:
            limit: number of leading pages to look up at most; None for all full pages.
        """
        if not self._may_reuse(sequence):
            return 0
        full_pages = (len(sequence.tokens) - 1) // self._pages.page_size
        chain, holds = sequence.chain, self._pages.holds
        matched = min(sequence.matched, full_pages)
        if matched and not holds(chain[matched]):  # evicted since the last call
            matched = bisect_left(range(matched), True, key=lambda index: not holds(chain[index + 1]))
        limit = full_pages if limit is None else min(limit, full_pages)
        while matched < limit:
            if len(chain) == matched + 1:
                self._extend_chain(sequence, matched + 1)
            if not holds(chain[matched + 1]):
                break
            matched += 1
        sequence.matched = matched
        if self._states is not None:
            return self._states.longest(chain, matched)
        return matched

    def room(self, running: Iterable[Sequence]) -> int:
        """Return how many pages are free, without the pages that `running` sequences need for their known tokens.

        `grow` does not change the result, because it only allocates such pages.
        """
        return self._pages.free - sum(max(self._needed(other) - len(other.pages), 0) for other in running)

    def pages_to_start(self, sequence: Sequence, prefix: list[int]) -> int:
        """Return by how many pages the start of `sequence` with the cached pages `prefix` reduces `room`."""
        return self._needed(sequence) - self._pages.count_held(prefix)

    def may_fit(self, sequence: Sequence, room: int, limit: int | None = None) -> bool:
        """Return False if `room` pages are too few to start `sequence`, without a walk over all of its pages.

        Args:
            limit: see `cached_pages`.
        """
        needed = self._needed(sequence)
        if needed <= room:
            return True
        cached, chain, is_held = self.cached_pages(sequence, limit), sequence.chain, self._pages.is_held
        held = bisect_left(range(cached), True, key=lambda index: not is_held(chain[index + 1]))
        return needed - held <= room

    def begin(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a starting sequence its cached pages `prefix`, and a state slot if the model has recurrent layers.

        The snapshot at the end of `prefix` is pinned until `take_restore` or `release`.
        """
        if self._states is not None:
            sequence.slot = self._states.take()
            if prefix:
                sequence.restore = self._states.pin(sequence.chain[len(prefix)])
        self._pages.share(prefix)
        sequence.pages = prefix
        sequence.computed = len(prefix) * self._pages.page_size

    def take_restore(self, sequence: Sequence) -> int | None:
        """Return the slot of the snapshot that the next step copies for `sequence`, and unpin the slot.

        Return None if there is nothing to copy. The caller must add the copy to the plan of the next step. Steps run in
        order, and a step copies before it saves snapshots, so the slot may be reserved again for this or a later step.
        """
        slot, sequence.restore = sequence.restore, None
        if self._states is not None and slot is not None:
            self._states.unpin(slot)
        return slot

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Allocate pages for the next `count` tokens of `sequence`. Return False if too few pages are free."""
        missing = self._pages.pages_for(sequence.computed + count) - len(sequence.pages)
        if missing > self._pages.free:
            return False
        sequence.pages += self._pages.take(max(missing, 0))
        return True

    def advance(self, sequence: Sequence, count: int) -> None:
        """Record that the next `count` tokens of `sequence` are computed. Register the pages that are now full."""
        registered_pages = sequence.computed // self._pages.page_size
        sequence.computed += count
        full_pages = sequence.computed // self._pages.page_size
        if full_pages > registered_pages and self._reuses:
            self._extend_chain(sequence, full_pages)
            for index in range(registered_pages, full_pages):
                self._pages.register(sequence.pages[index], sequence.chain[index + 1])

    def release(self, sequence: Sequence) -> None:
        """Release the pages and the state slot of `sequence`. Its registered pages stay in the prefix cache."""
        self._pages.give_back(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.fresh = 0
        sequence.encoded = None
        self.take_restore(sequence)
        if self._states is not None and sequence.slot is not None:
            self._states.give_back(sequence.slot)
            sequence.slot = None

    def discard(self, sequence: Sequence) -> list[int]:
        """Release the pages and the state slot of `sequence`, and unregister its pages and snapshots.

        Returns:
            The released pages that no other sequence uses.
        """
        pages = sequence.pages
        self._pages.forget(pages)
        if self._states is not None:
            for hash_of_page in sequence.chain:
                self._states.forget(hash_of_page)
        self.release(sequence)
        return [page for page in pages if not self._pages.count_held([page])]  # shared pages are finite

    def until_mark(self, sequence: Sequence, count: int) -> int:
        """Return the smaller of `count` and the number of tokens up to the prompt's next snapshot position.

        A prefill step must end at a snapshot position, because recurrent state can be copied only at the end of a step.
        Models without recurrent layers and decoding sequences have no such limit.
        """
        if self._states is None or sequence.decoding:
            return count
        return min(count, self._next_mark(sequence) - sequence.computed)

    def place_for_snapshot(self, sequence: Sequence, end: int) -> int | None:
        """Reserve a state slot for a snapshot at position `end`. Return None if no snapshot is taken at this position.

        In a prompt, snapshots are taken at the positions that `_next_mark` describes. In the output, a snapshot is
        taken at the end of each page.
        """
        if self._states is None or end % self._pages.page_size:
            return None
        if not sequence.decoding and end != self._next_mark(sequence):
            return None
        if sequence.tokens[end - 1] >= 0:  # otherwise the token, and so the page hash, is not known yet
            page = end // self._pages.page_size
            self._extend_chain(sequence, page)
            if self._states.holds(sequence.chain[page]):
                return None
        return self._states.reserve()

    def take_snapshot(self, entry: PlanEntry) -> None:
        """Register the snapshot that the step of `entry` has saved, if any.

        During decoding, a new snapshot of a sequence replaces its previous one.
        """
        if self._states is None or entry.save is None:
            return
        sequence, size = entry.sequence, self._pages.page_size
        count = (sequence.computed + entry.count) // size
        self._extend_chain(sequence, count)
        page = sequence.chain[count]
        self._states.register(entry.save, page, count)
        if entry.decoding:
            if sequence.follower is not None:
                self._states.forget(sequence.follower)
            sequence.follower = page

    def unreserve(self, save: int | None) -> None:
        """Release the reserved snapshot slot `save`, because the step that should fill it was not computed.

        If `save` is None, do nothing.
        """
        if self._states is not None and save is not None:
            self._states.unreserve(save)

    def _may_reuse(self, sequence: Sequence) -> bool:
        """Return whether `sequence` may start with cached pages (see `computed_before`)."""
        return self._reuses and sequence.pooled is None and sequence.request.prompt_logprobs is None

    def _next_mark(self, sequence: Sequence) -> int:
        """Return the next position of a prompt at which a snapshot is taken. A prefill step must end at this position.

        Snapshots are taken at these positions:

        * the end of the prompt's last full page, because the next message of the conversation continues near this
          position
        * the end of the last full page before the last user message, because the client may change this message
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

    def _extend_chain(self, sequence: Sequence, pages: int) -> None:
        """Extend the hash chain of `sequence` to its first `pages` pages."""
        page_hash.extend(sequence.chain, sequence.tokens, pages, self._pages.page_size, sequence.images)

    def _needed(self, sequence: Sequence) -> int:
        """Return the number of pages for all tokens of `sequence` and one more token.

        Without a page for the additional token, the sequence would be preempted before its next output token.
        """
        return self._pages.pages_for(len(sequence.tokens) + 1)
