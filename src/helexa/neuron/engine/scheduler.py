"""The scheduler: which sequences advance by how many tokens in the next step.

One rule: every sequence has `computed` chasing `tokens`. A step is a plan of (sequence, n) under one token budget,
running sequences first. Decode is n = 1, prefill is a chunk; preemption sets `computed` to 0 and puts the sequence back
at the head of the queue. A prefix that other sequences have computed before only moves `computed`, too. There is no
second code path. (The rule is vLLM V1's; Kwon et al., 2023, for the pages.)

`running` and `waiting` are each sorted by arrival. The newest sequence is preempted first, never an older one for a
newer one. Prompts are read in the order of arrival. A prompt that does not fit into a step is cut, and leaves half of
the step's prompt tokens to the other prompts, the shortest first. So a short prompt does not wait for the end of a
long one, and no prompt starves: the oldest gets half of every step at least.

When there are sequences of several principals, each one's first comes first, then each one's second; and a step may
leave out some of those that decode (see `turns`).
"""

import itertools
import logging
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec
from torch import Tensor

from helexa.neuron.engine import page_hash
from helexa.neuron.engine.memory import Memory
from helexa.neuron.engine.messages import EngineOptions, FinishReason, Logprob, TokenOutput
from helexa.neuron.engine.ngram import Drafter
from helexa.neuron.engine.overlap import foreseeable
from helexa.neuron.engine.pace import Pace
from helexa.neuron.engine.pages import PagePool
from helexa.neuron.engine.plan import Plan, PlanEntry
from helexa.neuron.engine.prompt_scores import are_finite
from helexa.neuron.engine.sequence import Sequence
from helexa.neuron.engine.states import StatePool
from helexa.neuron.engine.step_budget import StepBudget
from helexa.neuron.engine.turns import Ration, Turns
from helexa.neuron.ops.constants import MAX_DRAFTS, NON_FINITE

_log = logging.getLogger("helexa.neuron.engine")

_ROWS_ALIKE = 8  # a step with prompts beside others has a multiple of these, as steps of a new size take longer


class Scheduler:
    """Owns all sequences and the page pool.

    Args:
        options: budgets and ceilings.
        pages: the pool; sequences are bounded by it.
        states: slots for what recurrent layers keep, if the model has such. Such a state cannot go back, so drafts
            leave no trace in it: those that were right are computed once more, with the next token. A prefix that was
            computed before reaches as far as its last snapshot.
        budget: bound on the prompt tokens of a step; without one they are bounded by `options` alone.

    Attributes:
        prompt_tokens, cached_tokens: of all sequences that were started; the second were found in the pages of others.
    """

    def __init__(
        self,
        options: EngineOptions,
        pages: PagePool,
        states: StatePool | None = None,
        budget: StepBudget | None = None,
    ) -> None:
        self.options = options
        self.pages = pages
        self.states = states
        self._memory = Memory(pages, states, options.prefix_reuse)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._arrivals = itertools.count()
        self._pace = Pace(options.max_prefill_beside_decode)
        self._turns = Turns(self._pace)
        self._budget = budget or StepBudget(options.max_step_tokens)
        self._suspects: deque[Sequence] = deque()  # each has steps of its own, until it samples
        self._apart = False  # it is their turn
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._unsound: list[int] = []
        self._ahead = False  # a plan is made before the step before it is committed
        self._left_out = False  # it left a sequence out that found no page
        self._most_drafting = options.speculation_max_sequences if options.speculation else 0

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> TokenOutput | None:
        """Queue a sequence, or return its refusal."""
        if len(self.waiting) >= self.options.max_waiting:
            return self.refusal(sequence, f"overloaded: {len(self.waiting)} requests are waiting already")
        if not sequence.tokens:
            return self.refusal(sequence, "the prompt has no tokens")
        needed = self.pages.pages_for(len(sequence.tokens) + 1)
        if needed > self.pages.total:
            return self.refusal(sequence, f"the prompt needs {needed} KV pages, the cache has {self.pages.total}")
        if self._left(sequence) < 0:
            return self.refusal(sequence, f"the prompt is longer than the context of {self.options.context_length}")
        sequence.chain = page_hash.chain_of(sequence.request.salt if self.options.prefix_reuse == "principal" else "")
        sequence.arrival = next(self._arrivals)
        self.waiting.append(sequence)
        return None

    def cancel(self, sequence_id: int) -> bool:
        """Forget a sequence and free its pages; False when it is not here (any more)."""
        for queue in (self.running, self.waiting):
            for sequence in queue:
                if sequence.id == sequence_id:
                    queue.remove(sequence)
                    self._drop(sequence)
                    return True
        return False

    def plan(self) -> Plan:
        """The next step: one token of every sequence that decodes, then prompts, until the budget is spent.

        Nobody starves: whoever decodes is in every step, or takes turns, and prompts share what the budget leaves, at
        least one token.
        """
        self._left_out = False
        if self._suspects:
            self._apart = not self._apart
            if not self._apart and (others := self._plan_together()):
                return others
            if alone := self._plan_suspect():
                return alone
            self._suspects.clear()
        return self._plan_together()

    def plan_after(self) -> Plan:
        """The step after one that is not committed yet, while its sequences stand `as_after` it; may be empty.

        Nobody is preempted for it: whoever finds no page is left out, and the step after it waits.
        """
        self._ahead = True
        try:
            return self._plan_together()
        finally:
            self._ahead = False

    def foresees(self, plan: Plan) -> bool:
        """Whether `plan_after` can be asked for: nothing that it needs depends on the tokens that `plan` yields."""
        if self._suspects or self._left_out or not foreseeable(plan):
            return False
        decoding = [entry.sequence for entry in plan if entry.samples]
        return len(decoding) > self._most_drafting or not any(self._drafter(one).may_draft for one in decoding)

    def commit(
        self,
        plan: Plan,
        sampled: list[int],
        seconds: float | None = None,
        logprobs: Mapping[int, Logprob] = MappingProxyType({}),
        hidden: Mapping[int, Tensor] = MappingProxyType({}),
        scores: Mapping[int, list[Logprob]] = MappingProxyType({}),
    ) -> list[TokenOutput]:
        """Record a finished step.

        Args:
            seconds: that it took, if anything is to be learnt from it.
            sampled: for each entry that samples, in plan order, the token that follows its known ones, and then one
                for each draft: the token that would follow if this draft and those before it were right. As a draw
                depends on seed and position alone, those that count are the tokens of a step without drafts.
                `NON_FINITE` ends its sequence; nobody will find what it has computed.
            logprobs: of those whose sequences ask, by their place in `sampled`.
            hidden: what the vectors that are wanted get of this step, by the ids of their sequences.
            scores: the log-probabilities of the next prompt tokens, by the ids of the sequences that ask for them.
        """
        by_principal: Counter[str] = Counter()
        for entry in plan:
            if not entry.decoding:
                by_principal[entry.sequence.principal] += entry.count
        prompts = by_principal.total()
        rows = sum(entry.count + len(entry.drafts) for entry in plan if entry.decoding)
        if seconds is not None and prompts:
            self._budget.learn(rows + prompts, seconds)
        if seconds is not None:
            self._turns.learn(rows, by_principal, seconds)
        if seconds is not None and not rows:
            for entry in plan:
                entry.sequence.read_tokens += entry.count
                entry.sequence.read_seconds += seconds * entry.count / prompts
        row = 0
        outputs: list[TokenOutput] = []
        for entry in plan:
            sequence = entry.sequence
            if not sequence.pages:  # it has ended, or was cancelled, since the step was planned
                self._memory.unreserve(entry.save)
                row += entry.samples * (len(entry.drafts) + 1)
                continue
            self._memory.take_snapshot(entry)
            if sequence.pooled is not None:
                sequence.pooled.add(sequence.computed, hidden.get(sequence.id))
                if entry.completes:
                    outputs.append(self._end_pooled(sequence, sequence.pooled.finish()))
                    continue
            scored = scores.get(sequence.id, [])
            sequence.scored += len(scored)
            if not are_finite(scored):
                row += entry.samples
                outputs.append(self._end_unsound(sequence))
                continue
            if not entry.samples:
                self._memory.advance(sequence, entry.count)
                if entry.completes:
                    outputs.append(self._end_prompt(sequence, scored))
                elif scored or (sequence.request.reports_start and not sequence.cached_reported):
                    outputs.append(self._progress(sequence, scored))
                continue
            first, row = row, row + len(entry.drafts) + 1
            ahead = len(entry.drafts) if sequence.guide is None else sequence.guide.ahead
            kept = _kept(entry.drafts[:ahead], sampled[first:row])
            if sequence in self._suspects:
                self._suspects.remove(sequence)
            if kept[-1] == NON_FINITE:
                outputs.append(self._end_unsound(sequence))
                continue
            if entry.drafter is not None:
                entry.drafter.learn(len(entry.drafts), len(kept) - 1)
            cached = 0 if sequence.cached_reported else sequence.cached
            sequence.cached_reported = True
            said: list[int] = []
            finish: FinishReason | None = None
            for token in kept:
                said.append(token)
                finish = sequence.append(token) or ("length" if self._left(sequence) <= 0 else None)
                if finish is not None:
                    break
            if finish == "error":
                outputs.append(self._end_astray(sequence))
                continue
            sequence.fresh = len(said)
            self._memory.advance(sequence, entry.count + (len(said) - 1 if self.states is None else 0))
            timing = None
            if finish is not None:
                timing = sequence.timing()
                self.running.remove(sequence)
                self._memory.release(sequence)
            outputs.append(
                TokenOutput(
                    id=sequence.id,
                    tokens=said,
                    logprobs=[logprobs[first + i] for i in range(len(said))] if first in logprobs else [],
                    prompt_logprobs=scored,
                    cached_tokens=cached,
                    finish=finish,
                    timing=timing,
                )
            )
        return outputs

    def isolate(self, plan: Plan, error: str, after: Plan | None = None) -> list[TokenOutput]:
        """A planned step failed: if it was one sequence's alone, end that with `error`.

        If it was that of several, each begins anew, with steps of its own, until it goes on or fails.

        Args:
            after: the step that was launched after it, which counts for nothing: its sequences begin anew.
        """
        for entry in [*plan, *(after or [])]:
            self._memory.unreserve(entry.save)
        if len(plan) > 1:
            self._suspects = deque(self.running)
            for sequence in reversed(self._suspects):
                self._preempt(sequence)
            return []
        sequence = plan[0].sequence
        spoilt = {entry.sequence for entry in after or []} - {sequence}
        for other in reversed([one for one in self.running if one in spoilt]):
            self._preempt(other)
        if sequence not in self.running:
            return []  # it has ended meanwhile
        self.running.remove(sequence)
        self._drop(sequence)
        return [self.refusal(sequence, error)]

    def take_unsound(self) -> list[int]:
        """Pages that were given back and may hold what is no number; to be cleared before the next step."""
        pages, self._unsound = self._unsound, []
        return pages

    def fail_all(self, error: str) -> list[TokenOutput]:
        """End every sequence with an error that a retry may escape; nothing is left behind."""
        outputs: list[TokenOutput] = []
        for sequence in [*self.running, *self.waiting]:
            self._memory.release(sequence)
            outputs.append(msgspec.structs.replace(self.refusal(sequence, error), retry=True))
        self._suspects.clear()
        self.running.clear()
        self.waiting.clear()
        return outputs

    def check_idle(self) -> None:
        """Integrity: when nothing runs, nobody may hold a page."""
        assert not self.idle or self.pages.free == self.pages.total, "pages leaked"

    def _plan_together(self) -> Plan:
        """A step of all; as long as there are suspects, of those who run beside them."""
        plan: dict[Sequence, int] = {}
        ration = self._turns.ration(self.running, self.waiting)
        decoding = [s for s in self.running if s.decoding and s not in self._suspects and not self._ends(s)]
        for sequence in self._turns.choose(decoding, ration.rows):
            self._place(sequence, sequence.pending, plan)
        if not self._suspects:
            self._add_prompts(plan, ration)
            if not plan:
                self._add_prompts(plan, Ration())
        drafts: dict[Sequence, tuple[tuple[int, ...], Drafter | None]] = {}
        if len(decoding) <= self._most_drafting and not self._ahead:
            room = self.options.max_step_tokens - sum(plan.values())
            for sequence in decoding:
                if sequence in plan and sequence.decoding:  # it may have been preempted and started again just now
                    drafts[sequence] = self._draft(sequence, room)
                    room -= len(drafts[sequence][0])
        return [self._entry(sequence, count, *drafts.get(sequence, ((), None))) for sequence, count in plan.items()]

    def _plan_suspect(self) -> Plan:
        """A step of the next suspect alone; they take turns. Empty if there is no room for any."""
        plan: dict[Sequence, int] = {}
        for _ in range(len(self._suspects)):
            sequence = self._suspects[0]
            self._suspects.rotate(-1)
            if sequence not in self.running:
                if sequence is not self.waiting[0]:
                    continue  # an older one was preempted
                self.waiting.popleft()
                self._start(sequence, self._memory.computed_before(sequence))
            if self._place(sequence, min(sequence.pending, self._budget.tokens), plan):
                break
        return [self._entry(sequence, count, (), None) for sequence, count in plan.items()]

    def _end_unsound(self, sequence: Sequence) -> TokenOutput:
        """End a sequence whose logits were no numbers; its pages and snapshots are no use to anybody."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        self.running.remove(sequence)
        self._unsound += self._memory.discard(sequence)
        return self.refusal(sequence, "the model computed no numbers for this request")

    def _end_pooled(self, sequence: Sequence, vector: list[float]) -> TokenOutput:
        """End a sequence whose vector is complete, or is none."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        if not vector:
            return self._end_unsound(sequence)
        self.running.remove(sequence)
        self._memory.release(sequence)
        return TokenOutput(id=sequence.id, vector=vector, finish="stop", timing=sequence.timing())

    def _end_prompt(self, sequence: Sequence, scored: list[Logprob]) -> TokenOutput:
        """End a sequence that wants no output."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        self.running.remove(sequence)
        self._memory.release(sequence)
        cached, timing = sequence.cached, sequence.timing()
        return TokenOutput(id=sequence.id, prompt_logprobs=scored, cached_tokens=cached, finish="length", timing=timing)

    def _progress(self, sequence: Sequence, scored: list[Logprob]) -> TokenOutput:
        """What a step tells of a prompt that it did not complete."""
        if not sequence.request.reports_start or sequence.cached_reported:
            return TokenOutput(id=sequence.id, prompt_logprobs=scored)
        sequence.cached_reported = True
        return TokenOutput(id=sequence.id, prompt_logprobs=scored, cached_tokens=sequence.cached, started=True)

    def _end_astray(self, sequence: Sequence) -> TokenOutput:
        """End a sequence whose guide has an error."""
        guide = sequence.guide
        assert guide is not None
        self.running.remove(sequence)
        self._memory.release(sequence)
        if not guide.bad_grammar:
            _log.error("sequence failed id=%d error=%s", sequence.id, guide.error)
        return self.refusal(sequence, guide.error, bad_grammar=guide.bad_grammar)

    def _drop(self, sequence: Sequence) -> None:
        self._memory.release(sequence)
        if sequence in self._suspects:
            self._suspects.remove(sequence)

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        insort(self.running, sequence, key=lambda one: one.arrival)
        self._memory.begin(sequence, prefix)
        if sequence.started is None:
            sequence.started = time.perf_counter()
            sequence.cached = sequence.computed
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += sequence.cached

    def _add_prompts(self, plan: dict[Sequence, int], ration: Ration) -> None:
        """Plan chunks of prompts beside what is planned already."""
        room = min(max(self.options.max_step_tokens - sum(plan.values()), 1), self._budget.tokens)
        if plan and self.options.max_prefill_beside_decode:
            width = min(len(self.running) + len(self.waiting), self.options.max_sequences)
            most = min(room, self.options.max_prefill_beside_decode)
            room = min(most, self._pace.room(len(plan), width), ration.room or most)
            if room >= 2 * _ROWS_ALIKE:  # to the nearest, so that prompts lose nothing by it
                rows = (len(plan) + room + _ROWS_ALIKE // 2) // _ROWS_ALIKE * _ROWS_ALIKE
                room = min(most, rows - len(plan))
        prompts = self._prompts(ration)
        while room and (sequence := next(prompts, None)):
            allowed = ration.tokens_for(sequence)
            if sequence.pending > room and allowed >= room:
                ration.widen(sequence, room // 2)
                room -= self._add_shortest(room // 2, sequence, plan, ration)
                self._place(sequence, room, plan)
                break
            room -= self._take(sequence, min(sequence.pending, allowed, room), plan, ration)

    def _prompts(self, ration: Ration) -> Iterator[Sequence]:
        """Sequences to prefill: those that run, then newcomers, each started when its turn comes. Oldest first.

        Of several principals each one's first comes first, whether it runs or is new.
        """
        places: Counter[str] = Counter()
        begun: deque[tuple[int, Sequence]] = deque()
        for sequence in self.running:
            if not sequence.decoding:
                begun.append((places[sequence.principal], sequence))
            places[sequence.principal] += 1
        begun = deque(sorted(begun, key=lambda pair: pair[0]))
        full = False
        while True:
            new = None if full else self._newcomer(places, ration)
            if new is not None and (not begun or places[new.principal] < begun[0][0]):
                prefix = self._prefix_to_start(new)
                if prefix is None:
                    full = True
                    continue
                self.waiting.remove(new)
                self._start(new, prefix)
                places[new.principal] += 1
                yield new
            elif begun:
                _, sequence = begun.popleft()
                if ration.tokens_for(sequence):
                    yield sequence
            else:
                return

    def _newcomer(self, places: Counter[str], ration: Ration) -> Sequence | None:
        """Who starts next, if anybody may: of the principal that has fewest running, whoever waits longest."""
        candidates = (sequence for sequence in self.waiting if ration.tokens_for(sequence))
        return min(candidates, key=lambda sequence: places[sequence.principal], default=None)

    def _add_shortest(self, room: int, cut: Sequence, plan: dict[Sequence, int], ration: Ration) -> int:
        """Give `room` tokens to prompts other than `cut`, the shortest first; return how many tokens they took."""
        left = room
        shortest = self._shortest(cut, plan, ration)
        while left and (sequence := next(shortest, None)):
            left -= self._take(sequence, min(sequence.pending, left, ration.tokens_for(sequence)), plan, ration)
        return room - left

    def _shortest(self, cut: Sequence, plan: dict[Sequence, int], ration: Ration) -> Iterator[Sequence]:
        """Yield prompts other than `cut` that are not in `plan`, those with the fewest tokens to compute first.

        Waiting prompts start when their turn comes. None of them starts while the first of them finds no pages: others
        would take the pages that it waits for.
        """
        begun = [one for one in self.running if not one.decoding and one is not cut and one not in plan]
        may_start = bool(self.waiting) and self._prefix_to_start(self.waiting[0]) is not None
        missing = {one: self._memory.missing(one) for one in self.waiting} if may_start else {}
        for sequence in sorted([*begun, *missing], key=lambda one: missing.get(one, one.pending)):
            if not ration.tokens_for(sequence):
                continue
            if sequence in missing:
                prefix = self._prefix_to_start(sequence)
                if prefix is None:
                    continue
                self.waiting.remove(sequence)
                self._start(sequence, prefix)
            yield sequence

    def _prefix_to_start(self, sequence: Sequence) -> list[int] | None:
        """Return the pages that a waiting sequence can start with, or None if there is no place or no memory for it."""
        if len(self.running) >= self.options.max_sequences:
            return None
        prefix = self._memory.computed_before(sequence)
        return prefix if self._memory.has_room(sequence, prefix, self.running) else None

    def _take(self, sequence: Sequence, count: int, plan: dict[Sequence, int], ration: Ration) -> int:
        """Plan `count` tokens of a prompt, out of its principal's ration."""
        taken = self._place(sequence, count, plan)
        ration.take(sequence, taken)
        return taken

    def _place(self, sequence: Sequence, count: int, plan: dict[Sequence, int]) -> int:
        """Plan `count` tokens of a sequence, preempting newer ones for their pages; 0 if it had to yield itself."""
        if sequence not in self.running:
            return 0  # it was preempted for an older one just now
        count = self._memory.until_mark(sequence, count)
        while not self._memory.grow(sequence, count):
            if self._ahead:
                self._left_out = True
                return 0
            victim = self.running[-1]
            plan.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return 0
        plan[sequence] = count
        return count

    def _entry(self, sequence: Sequence, count: int, drafts: tuple[int, ...], drafter: Drafter | None) -> PlanEntry:
        restore, sequence.restore = sequence.restore, None
        save = self._memory.place_for_snapshot(sequence, sequence.computed + count)
        return PlanEntry(sequence, count, drafts, restore, save, drafter)

    def _draft(self, sequence: Sequence, room: int) -> tuple[tuple[int, ...], Drafter | None]:
        """Drafts for a sequence in the plan, as far as there is a use, `room` and a page; and who guessed them."""
        left = min(self._left(sequence), sequence.request.max_tokens - sequence.generated)
        limit = min(room, left - 1, MAX_DRAFTS)  # the last token needs no draft: it is sampled after the others
        if limit <= 0:
            return (), None
        drafts, drafter = () if sequence.guide is None else sequence.guide.forced(limit), None
        if not drafts:
            drafter = self._drafter(sequence)
            drafts = drafter.draft(limit)
            if sequence.guide is not None:
                drafts = sequence.guide.fitting(drafts)
        if not drafts or not self._memory.grow(sequence, sequence.pending + len(drafts)):
            return (), None
        return drafts, drafter

    @staticmethod
    def _drafter(sequence: Sequence) -> Drafter:
        sequence.drafter = sequence.drafter or Drafter(sequence.tokens)
        return sequence.drafter

    def _ends(self, sequence: Sequence) -> bool:
        """Whether it ends with the token that is under way, whichever that is."""
        return self._ahead and (sequence.generated >= sequence.request.max_tokens or self._left(sequence) <= 0)

    def _left(self, sequence: Sequence) -> int:
        """Tokens that the sequence may still get, by the context and by what the cache could hold."""
        capacity = self.pages.total * self.pages.page_size
        return min(self.options.context_length or capacity, capacity) - len(sequence.tokens)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._memory.release(sequence)
        self.waiting.appendleft(sequence)

    @staticmethod
    def refusal(sequence: Sequence, error: str, *, bad_grammar: bool = False) -> TokenOutput:
        """The last output of a sequence that ends in an error."""
        timing = sequence.timing()
        return TokenOutput(id=sequence.id, finish="error", error=error, bad_grammar=bad_grammar, timing=timing)


def _kept(drafts: tuple[int, ...], sampled: list[int]) -> list[int]:
    """The sampled tokens whose drafts before them were all right: one at least."""
    right = 0
    while right < len(drafts) and sampled[right] == drafts[right]:
        right += 1
    return sampled[: right + 1]
