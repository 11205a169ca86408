"""Allocates KV pages and state slots for sequences, and finds cached prefixes.

A full page is registered for reuse as soon as it is computed. For models with recurrent layers, a snapshot of the state
is taken at positions where a later prompt is likely to continue (see `kv_cache_and_prefix_hashes`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable

from helexa.neuron.engine.ipc.engine_options import PrefixReuse
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool, extend_chain
from helexa.neuron.engine.scheduling.draft_length import ModelDrafter, first_position, is_behind
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.window_page_pool import first_page_in_window

_SNAPSHOT_INTERVAL = 2048  # positions between snapshots within a prompt
# Maximum number of pages of waiting prompts to look up in a step. The lookups take about a millisecond, most of it for
# page hashes.
_MAX_NEW_MATCHES = 512


class Memory:
    """Allocates KV pages and state slots to sequences.

    Args:
        states: the state pool; None for a model without recurrent layers.
        reuse: which prompts share pages (see `EngineOptions.prefix_reuse`).
        window: largest sliding window of the layers, in positions; None if a sequence must keep all its KV pages.
    """

    def __init__(
        self, pages: PagePool, states: StatePool | None, reuse: PrefixReuse, window: int | None = None
    ) -> None:
        self._pages = pages
        self._windows = pages.windows
        self._states = states
        # The modes `principal` and `all` differ only in the salts of the hash chains.
        self._reuses = reuse != "off"
        self._window = window
        # Called before the pages of a sequence are released.
        self.on_release: Callable[[Sequence], None] = lambda sequence: None
        # Called with a sequence whose pages may contain NaN or infinity.
        self.on_discard: Callable[[Sequence], None] = lambda sequence: None

    def computed_before(self, sequence: Sequence) -> list[int]:
        """Return the cached pages with which `sequence` can start, before its last token."""
        if not self.may_reuse(sequence):
            return []
        full_pages = (len(sequence.tokens) - 1) // self._pages.page_size  # the logits of the last token are needed
        pages = self._pages.match(sequence.chain[1 : full_pages + 1])
        while len(pages) == len(sequence.chain) - 1 < full_pages:  # stops at the first page that is not cached
            self.extend_chain(sequence, len(pages) + 1)
            pages += self._pages.match(sequence.chain[-1:])
        if self._states is not None:
            pages = pages[: self._states.longest(sequence.chain, len(pages))]
        if self._windows is None:
            return pages
        present = self._windows.present
        return pages[: self._windows.usable(len(pages), lambda index: present[pages[index]] == 1)]

    def missing(self, waiting: Iterable[Sequence]) -> dict[Sequence, int]:
        """Return an upper bound of the tokens that each waiting sequence must compute."""
        missing: dict[Sequence, int] = {}
        # A new long prompt is looked up over several steps. Until its lookup is complete, its bound is too high.
        budget = _MAX_NEW_MATCHES
        for sequence in waiting:
            known = sequence.matched
            cached = self.cached_pages(sequence, known + budget)
            budget -= max(sequence.matched - known, 0)
            missing[sequence] = len(sequence.tokens) - cached * self._pages.page_size
        return missing

    def cached_pages(self, sequence: Sequence, limit: int | None = None) -> int:
        """Estimate how many pages `computed_before` returns; do not walk over all pages.

        Args:
            limit: number of leading pages to look up at most; None for all full pages.
        """
        if not self.may_reuse(sequence):
            return 0
        full_pages = (len(sequence.tokens) - 1) // self._pages.page_size
        chain, holds = sequence.chain, self._pages.holds
        matched = min(sequence.matched, full_pages)
        if matched and not holds(chain[matched]):  # the last matched page was evicted
            # The bisection is exact if no cached page follows a page that is not cached. This is nearly always the
            # case, because pages at the end of a sequence are evicted first.
            matched = bisect_left(range(matched), True, key=lambda index: not holds(chain[index + 1]))
        limit = full_pages if limit is None else min(limit, full_pages)
        while matched < limit:
            if len(chain) == matched + 1:
                self.extend_chain(sequence, matched + 1)
            if not holds(chain[matched + 1]):
                break
            matched += 1
        sequence.matched = matched
        if self._states is not None:
            matched = self._states.longest(chain, matched)
        if self._windows is not None:
            has_window_page = self._pages.has_window_page
            return self._windows.usable(matched, lambda index: has_window_page(chain[index + 1]))
        return matched

    def room(self, running: Iterable[Sequence]) -> int:
        """Return the free pages minus those that `running` needs; can be negative."""
        # `grow` does not change this number, because it only allocates pages that are subtracted here.
        return self._pages.free - sum(max(self._needed(other) - len(other.pages), 0) for other in running)

    def pages_to_start(self, sequence: Sequence, prefix: list[int]) -> int:
        """Return by how many pages a start with the cached pages `prefix` reduces `room`."""
        return self._needed(sequence) - self._pages.count_held(prefix)

    def may_fit(self, sequence: Sequence, room: int, limit: int | None = None) -> bool:
        """Return False if `room` pages are certainly too few to start `sequence`.

        Args:
            limit: see `cached_pages`.
        """
        needed = self._needed(sequence)
        if needed <= room:
            return True
        cached, chain, is_held = self.cached_pages(sequence, limit), sequence.chain, self._pages.is_held
        # Cached pages that other sequences hold take no room. Bisection counts them, because they come before the
        # other cached pages, and a walk over all pages would be too slow.
        held = bisect_left(range(cached), True, key=lambda index: not is_held(chain[index + 1]))
        return needed - held <= room

    def begin(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a starting sequence the cached pages `prefix`, and a state slot if needed.

        The slot's state is valid only after the copy of the snapshot `sequence.restore`, which `take_restore` plans.
        """
        if self._states is not None:
            sequence.slot = self._states.take()
            if prefix:
                # The pin keeps the snapshot until its copy is planned (`take_restore`, `release`).
                sequence.restore = self._states.pin(sequence.chain[len(prefix)])
        self._pages.share(prefix)
        sequence.pages = prefix
        sequence.computed = len(prefix) * self._pages.page_size
        if self._windows is not None:
            sequence.unseen = self._windows.first_needed(sequence.computed)
            self._windows.share(prefix[sequence.unseen :])
        self._release_unseen(sequence)

    def take_restore(self, sequence: Sequence) -> int | None:
        """Unpin and return the slot of the snapshot that the next step must copy.

        Return None if there is no snapshot to copy. The caller must add the copy to the plan of the next step.
        """
        slot, sequence.restore = sequence.restore, None
        if self._states is not None and slot is not None:
            # Steps run in order, and a step copies before it saves snapshots. The slot may therefore be reserved again.
            self._states.unpin(slot)
        return slot

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Allocate pages for the next `count` tokens; return False if too few are free."""
        missing = self._pages.pages_for(sequence.computed + count) - len(sequence.pages)
        if missing > self._pages.free or (self._windows is not None and missing > self._windows.free):
            return False
        pages = self._pages.take(max(missing, 0))
        if self._windows is not None:
            self._windows.take(pages)
        sequence.pages += pages
        return True

    def advance(self, sequence: Sequence, count: int) -> None:
        """Record that the next `count` tokens are computed, and register the full pages."""
        registered_pages = sequence.computed // self._pages.page_size
        sequence.computed += count
        full_pages = sequence.computed // self._pages.page_size
        if full_pages > registered_pages and self._reuses:
            self.extend_chain(sequence, full_pages)
            for index in range(registered_pages, full_pages):
                self._pages.register(sequence.pages[index], sequence.chain[index + 1])
        if sequence.model_drafter is not None:
            self._mark_drafted(sequence, sequence.model_drafter)
        self._release_unseen(sequence)

    def prepare_drafts(self, sequence: Sequence, drafter: ModelDrafter) -> None:
        """Set where a drafter continues: if far behind, after pages in `PagePool.drafted`."""
        length = len(sequence.tokens)
        # number of positions in released pages, which other sequences may use now
        released = sequence.unseen * self._pages.page_size
        if not drafter.end or drafter.end < released or is_behind(length, drafter.end):
            self._find_drafted(sequence, drafter)
        drafter.end = min(drafter.end, length - 1)  # the draft model computes at least one token to draft

    def _find_drafted(self, sequence: Sequence, drafter: ModelDrafter) -> None:
        size, pages, drafted = self._pages.page_size, sequence.pages, self._pages.drafted
        first = max(first_position(len(sequence.tokens), size) // size, sequence.unseen)
        end = (len(sequence.tokens) - 1) // size
        while end > first and pages[end - 1] not in drafted:
            end -= 1
        start = end
        while start > sequence.unseen and pages[start - 1] in drafted:
            start -= 1
        drafter.start, drafter.end, drafter.marked = start * size, end * size, end

    def _mark_drafted(self, sequence: Sequence, drafter: ModelDrafter) -> None:
        """Mark the pages of `sequence` that the draft model has computed completely."""
        full_pages = drafter.end // self._pages.page_size
        if full_pages > drafter.marked:
            self._pages.drafted.update(sequence.pages[drafter.marked : full_pages])
            drafter.marked = full_pages

    def release(self, sequence: Sequence) -> None:
        """Release the pages and the state slot of `sequence`, and set `computed` to 0."""
        self.on_release(sequence)
        pages = sequence.pages[sequence.unseen :]
        if self._windows is not None:
            self._windows.give_back(pages)
            pages = sequence.pages
        self._pages.give_back(pages)
        sequence.pages, sequence.unseen = [], 0
        sequence.computed = sequence.fresh = 0
        sequence.encoded = None
        if sequence.model_drafter is not None:
            sequence.model_drafter.forget()
        self.take_restore(sequence)
        if self._states is not None and sequence.slot is not None:
            self._states.give_back(sequence.slot)
            sequence.slot = None

    def discard(self, sequence: Sequence) -> list[int]:
        """Release and unregister a sequence's pages; return those without another holder.

        The result has the numbers of the parts of these pages (see `PagePool.parts`).
        """
        self.on_discard(sequence)
        pages = sequence.pages[sequence.unseen if self._windows is None else 0 :]
        self._pages.forget(pages)
        # Pages before the window are released already, but may still be in the prefix cache.
        for hash_of_page in sequence.chain[1 : sequence.unseen + 1]:
            pages += self._pages.drop(hash_of_page)
        released = [(page, self._pages.parts(page)) for page in pages]
        if self._states is not None:
            for hash_of_page in sequence.chain:
                self._states.forget(hash_of_page)
        self.release(sequence)
        # Pages that other sequences still hold are left out, because their contents are finite.
        return [part for page, parts in released if not self._pages.count_held([page]) for part in parts]

    def _release_unseen(self, sequence: Sequence) -> None:
        """Release the pages, or window pages, before the window of the next token."""
        # No later step of the sequence reads these pages. Registered pages stay in the prefix cache until they are
        # evicted. Steps run in order, so a step in flight reads a page before a later step overwrites the page.
        if self._window is None:
            return
        unseen = first_page_in_window(sequence.computed, self._window, self._pages.page_size)
        if unseen > sequence.unseen:
            pool = self._pages if self._windows is None else self._windows
            pool.give_back(sequence.pages[sequence.unseen : unseen])
            sequence.unseen = unseen

    def until_mark(self, sequence: Sequence, count: int) -> int:
        """Return `count`, limited to the tokens up to the prompt's next snapshot position."""
        if self._states is None or sequence.decoding:
            return count
        # Recurrent state can be copied only at the end of a step, so a prefill step must end at a snapshot position.
        return min(count, self._next_mark(sequence) - sequence.computed)

    def place_for_snapshot(self, sequence: Sequence, end: int) -> int | None:
        """Reserve a slot for `take_snapshot` at position `end`; None for no snapshot."""
        if self._states is None or end % self._pages.page_size:
            return None
        # In a prompt, snapshots are taken only at certain positions, but in the output at the end of each page.
        if not sequence.decoding and end != self._next_mark(sequence):
            return None
        if sequence.tokens[end - 1] >= 0:  # otherwise the token, and so the page hash, is not known yet
            page = end // self._pages.page_size
            self.extend_chain(sequence, page)
            if self._states.holds(sequence.chain[page]):
                return None
        return self._states.reserve()

    def take_snapshot(self, entry: PlanEntry) -> None:
        """Register the snapshot that the step of `entry` saved, if any; before `advance`."""
        if self._states is None or entry.save is None:
            return
        sequence, size = entry.sequence, self._pages.page_size
        count = (sequence.computed + entry.count) // size
        self.extend_chain(sequence, count)
        page = sequence.chain[count]
        self._states.register(entry.save, page, count)
        if entry.decoding:
            # Only the last snapshot of an output is useful: the next message follows the whole answer.
            if sequence.follower is not None:
                self._states.forget(sequence.follower)
            sequence.follower = page

    def unreserve(self, save: int | None) -> None:
        """Release the snapshot slot `save`, if any, of a step that was not computed."""
        if self._states is not None and save is not None:
            self._states.unreserve(save)

    def may_reuse(self, sequence: Sequence) -> bool:
        """Return whether `sequence` may start with cached pages."""
        # Embeddings and prompt log-probabilities need the hidden states of the whole prompt, which no KV page contains.
        return self._reuses and sequence.pooled is None and sequence.request.prompt_logprobs is None

    def half_page(self, sequence: Sequence) -> bytes:
        """Return the hash of the page that ends the first half of a prompt."""
        pages = len(sequence.request.prompt) // self._pages.page_size // 2
        self.extend_chain(sequence, pages)
        return sequence.chain[pages]

    def holds(self, page_hash: bytes) -> bool:
        """Return whether the page with this hash is in the prefix cache."""
        return self._pages.holds(page_hash)

    def has_page(self, sequence: Sequence) -> bool:
        """Return whether the page after the cached pages of a sequence is in memory.

        If so, the sequence cannot start after this page, because a snapshot or a window page is missing.
        """
        following = sequence.computed // self._pages.page_size + 1
        return following < len(sequence.chain) and self._pages.holds(sequence.chain[following])

    def most_lost(self, tokens: int) -> int:
        """Return how many tokens must be computed again to report a `PrefixMiss`.

        The result is `tokens` for models without recurrent layers. Other models start only at snapshots, so they often
        compute tokens of cached pages again. For them, the result is larger than the interval of snapshots.
        """
        return tokens if self._states is None else max(tokens, _SNAPSHOT_INTERVAL + 1)

    def _next_mark(self, sequence: Sequence) -> int:
        """Return the next position of a prompt at which a snapshot is taken."""
        page_size, position = self._pages.page_size, sequence.computed
        request = sequence.request
        ends = (
            # The next message of the conversation continues near the end of this prompt.
            (len(request.prompt) - 1) // page_size * page_size,
            # A later prompt may have another last user message.
            request.turn // page_size * page_size,
            (position // _SNAPSHOT_INTERVAL + 1) * _SNAPSHOT_INTERVAL,
        )
        return min(end for end in ends if end > position)

    def extend_chain(self, sequence: Sequence, pages: int) -> None:
        """Extend the hash chain of `sequence` to its first `pages` pages."""
        image_key = None if sequence.images is None else sequence.images.key
        extend_chain(sequence.chain, sequence.tokens, pages, self._pages.page_size, image_key)

    def _needed(self, sequence: Sequence) -> int:
        """Return the number of pages for all tokens of `sequence` and one more token."""
        # Without a page for the additional token, the sequence would be preempted before its next output token.
        return self._pages.pages_for(len(sequence.tokens) + 1)
