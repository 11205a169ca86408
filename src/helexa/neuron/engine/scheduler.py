"""The scheduler: which sequences advance by how many tokens in the next step.

One rule: every sequence has `computed` chasing `tokens`. A step is a plan of (sequence, n) under one token budget,
running sequences first. Decode is n = 1, prefill is a chunk; preemption sets `computed` to 0 and puts the sequence back
at the head of the queue. A prefix that other sequences have computed before only moves `computed`, too. There is no
second code path. (The rule is vLLM V1's; Kwon et al., 2023, for the pages.)
"""

import time
from collections import deque
from dataclasses import dataclass

from helexa.neuron.engine import page_hash
from helexa.neuron.engine.messages import EngineOptions, TokenOutput
from helexa.neuron.engine.pages import PagePool
from helexa.neuron.engine.sequence import Sequence


@dataclass(frozen=True)
class PlanEntry:
    """`sequence` advances by `count` tokens; `samples` when that reaches its last known token."""

    sequence: Sequence
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this step yields a new token for the sequence."""
        return self.count == self.sequence.pending


Plan = list[PlanEntry]


class Scheduler:
    """Owns all sequences and the page pool.

    Args:
        options: budgets and ceilings.
        pages: the pool; sequences are bounded by it.

    Attributes:
        prompt_tokens, cached_tokens: of all sequences that were started; the second were found in the pages of others.
    """

    def __init__(self, options: EngineOptions, pages: PagePool) -> None:
        self.options = options
        self.pages = pages
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> TokenOutput | None:
        """Queue a sequence, or return its refusal."""
        if len(self.waiting) >= self.options.max_waiting:
            return self._refusal(sequence, f"overloaded: {len(self.waiting)} requests are waiting already")
        needed = self.pages.pages_for(len(sequence.tokens) + 1)
        if needed > self.pages.total:
            return self._refusal(sequence, f"the prompt needs {needed} KV pages, the cache has {self.pages.total}")
        sequence.chain = page_hash.chain_of(sequence.request.salt if self.options.prefix_reuse == "principal" else "")
        self.waiting.append(sequence)
        return None

    def cancel(self, sequence_id: int) -> bool:
        """Forget a sequence and free its pages; False when it is not here (any more)."""
        for queue in (self.running, self.waiting):
            for sequence in queue:
                if sequence.id == sequence_id:
                    queue.remove(sequence)
                    self._release(sequence)
                    return True
        return False

    def plan(self) -> Plan:
        """The next step: decoding sequences first, then prefill chunks, then newcomers, until the budget is spent."""
        budget = self.options.max_step_tokens
        plan: Plan = []
        planned: set[Sequence] = set()
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            if sequence not in self.running:  # preempted by one before it
                continue
            count = min(sequence.pending, budget)
            if count == 0:
                break
            if not self._make_room(sequence, count, planned):
                continue
            plan.append(PlanEntry(sequence, count))
            planned.add(sequence)
            budget -= count
        while budget and self.waiting and len(self.running) < self.options.max_sequences:
            sequence = self.waiting[0]
            prefix = self._computed_before(sequence)
            # The whole prompt and one token more must fit, or it would be preempted before its first token.
            if self.pages.pages_for(len(sequence.tokens) + 1) - self.pages.held(prefix) > self.pages.free:
                break
            self._start(self.waiting.popleft(), prefix)
            count = min(sequence.pending, budget)
            self._grow(sequence, count)
            plan.append(PlanEntry(sequence, count))
            budget -= count
        return plan

    def commit(self, plan: Plan, sampled: list[int]) -> list[TokenOutput]:
        """Record a finished step. `sampled` has one token for each entry that samples, in plan order."""
        tokens = iter(sampled)
        outputs: list[TokenOutput] = []
        for entry in plan:
            sequence = entry.sequence
            samples = entry.samples
            self._advance(sequence, entry.count)
            if not samples:
                continue
            token = next(tokens)
            cached = 0 if sequence.generated else sequence.cached
            finish = sequence.append(token)
            if finish is None and self._outgrown(sequence):
                finish = "length"
            if finish is None:
                outputs.append(TokenOutput(id=sequence.id, tokens=[token], cached_tokens=cached))
                continue
            self.running.remove(sequence)
            self._release(sequence)
            outputs.append(
                TokenOutput(
                    id=sequence.id, tokens=[token], cached_tokens=cached, finish=finish, timing=sequence.timing()
                )
            )
        return outputs

    def fail_all(self, error: str) -> list[TokenOutput]:
        """End every sequence with an error; nothing is left behind."""
        outputs: list[TokenOutput] = []
        for sequence in [*self.running, *self.waiting]:
            self._release(sequence)
            outputs.append(self._refusal(sequence, error))
        self.running.clear()
        self.waiting.clear()
        return outputs

    def check_idle(self) -> None:
        """Integrity: when nothing runs, nobody may hold a page."""
        assert not self.idle or self.pages.free == self.pages.total, "pages leaked"

    def _computed_before(self, sequence: Sequence) -> list[int]:
        """Pages that hold the beginning of `sequence`; its last token is left to be computed, for its logits."""
        if self.options.prefix_reuse == "off":
            return []
        full = (len(sequence.tokens) - 1) // self.pages.page_size
        page_hash.extend(sequence.chain, sequence.tokens, full, self.pages.page_size)
        return self.pages.match(sequence.chain[1 : full + 1])

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        self.running.append(sequence)
        self.pages.share(prefix)
        sequence.pages = prefix
        sequence.computed = len(prefix) * self.pages.page_size
        if sequence.started is None:
            sequence.started = time.perf_counter()
            sequence.cached = sequence.computed
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += sequence.cached

    def _advance(self, sequence: Sequence, count: int) -> None:
        """Count tokens as computed, and register the pages that this has filled."""
        filled = sequence.computed // self.pages.page_size
        sequence.computed += count
        full = sequence.computed // self.pages.page_size
        if full > filled and self.options.prefix_reuse != "off":
            page_hash.extend(sequence.chain, sequence.tokens, full, self.pages.page_size)
            for page in range(filled, full):
                self.pages.register(sequence.pages[page], sequence.chain[page + 1])

    def _make_room(self, sequence: Sequence, count: int, planned: set[Sequence]) -> bool:
        """Grow `sequence` by `count` positions, preempting the newest others; False if it had to yield itself."""
        while not self._grow(sequence, count):
            victim = next((s for s in reversed(self.running) if s not in planned), sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, count: int) -> bool:
        missing = self.pages.pages_for(sequence.computed + count) - len(sequence.pages)
        if missing > self.pages.free:
            return False
        sequence.pages += self.pages.take(max(missing, 0))
        return True

    def _outgrown(self, sequence: Sequence) -> bool:
        capacity = self.pages.total * self.pages.page_size
        limit = self.options.context_length or capacity
        return len(sequence.tokens) >= min(limit, capacity)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

    @staticmethod
    def _refusal(sequence: Sequence, error: str) -> TokenOutput:
        return TokenOutput(id=sequence.id, finish="error", error=error, timing=sequence.timing())
