"""The scheduler: which sequences advance by how many tokens in the next step.

One rule: every sequence has `computed` chasing `tokens`. A step is a plan of (sequence, n) under one token budget,
running sequences first. Decode is n = 1, prefill is a chunk; preemption sets `computed` to 0 and puts the sequence back
at the head of the queue. A prefix that other sequences have computed before only moves `computed`, too. There is no
second code path. (The rule is vLLM V1's; Kwon et al., 2023, for the pages.)

The newest sequence is preempted first, never an older one for a newer one. `planner` says what a step computes,
`committer` what becomes of its results.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from helexa.neuron.engine.ipc.messages import EngineOptions, Logprob, TokenOutput
from helexa.neuron.engine.kv_cache import page_hash
from helexa.neuron.engine.kv_cache.page_pool import PagePool
from helexa.neuron.engine.kv_cache.state_pool import StatePool
from helexa.neuron.engine.scheduling.committer import Committer
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.planner import Planner
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.sequence_memory import Memory
from helexa.neuron.engine.scheduling.step_controller import StepController
from helexa.neuron.engine.step.step_input import Float32


class Scheduler:
    """Owns all sequences and the page pool.

    Args:
        options: budgets and ceilings.
        pages: the pool; sequences are bounded by it.
        states: slots for what recurrent layers keep, if the model has such. Such a state cannot go back, so drafts
            leave no trace in it: those that were right are computed once more, with the next token. A prefix that was
            computed before reaches as far as its last snapshot.
        controller: limits the steps; without one, a controller that knows no time limit does.
    """

    def __init__(
        self,
        options: EngineOptions,
        pages: PagePool,
        states: StatePool | None = None,
        controller: StepController | None = None,
    ) -> None:
        self.options = options
        self.pages = pages
        self.states = states
        capacity = pages.total * pages.page_size
        self._most_tokens = min(options.context_length or capacity, capacity)
        self.queues = Queues(Memory(pages, states, options.prefix_reuse))
        self.planner = Planner(options, self.queues, self._most_tokens, controller or StepController(options))
        self._committer = Committer(self.queues, self._most_tokens, recurrent=states is not None)
        self._arrivals = itertools.count()

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold pages, sorted by arrival."""
        return self.queues.running

    @property
    def waiting(self) -> deque[Sequence]:
        """Sequences that have not started or were preempted, sorted by arrival."""
        return self.queues.waiting

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> TokenOutput | None:
        """Queue a sequence, or return its refusal."""
        if len(self.waiting) >= self.options.max_waiting:
            return sequence.failure(f"overloaded: {len(self.waiting)} requests are waiting already")
        if not sequence.tokens:
            return sequence.failure("the prompt has no tokens")
        needed = self.pages.pages_for(len(sequence.tokens) + 1)
        if needed > self.pages.total:
            return sequence.failure(f"the prompt needs {needed} KV pages, the cache has {self.pages.total}")
        if len(sequence.tokens) > self._most_tokens:
            return sequence.failure(f"the prompt is longer than the context of {self.options.context_length}")
        sequence.chain = page_hash.chain_of(sequence.request.salt if self.options.prefix_reuse == "principal" else "")
        sequence.arrival = next(self._arrivals)
        self.waiting.append(sequence)
        return None

    def cancel(self, sequence_id: int) -> bool:
        """Forget a sequence and free its pages; False when it is not here (any more)."""
        return self.queues.cancel(sequence_id)

    def plan(self) -> Plan:
        """See `Planner.plan`."""
        return self.planner.plan()

    def plan_after(self) -> Plan:
        """See `Planner.plan_after`."""
        return self.planner.plan_after()

    def foresees(self, plan: Plan) -> bool:
        """See `Planner.foresees`."""
        return self.planner.foresees(plan)

    def commit(
        self,
        plan: Plan,
        sampled: list[int],
        seconds: float | None = None,
        logprobs: Mapping[int, Logprob] = MappingProxyType({}),
        hidden: Mapping[int, Float32] = MappingProxyType({}),
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
        if seconds is not None:
            self.planner.learn(plan, seconds)
        return self._committer.commit(plan, sampled, logprobs, hidden, scores)

    def isolate(self, plan: Plan, error: str, after: Plan | None = None) -> list[TokenOutput]:
        """A planned step failed: if it was one sequence's alone, end that with `error`.

        If it was that of several, each begins anew, with steps of its own, until it goes on or fails.

        Args:
            after: the step that was launched after it, which counts for nothing: its sequences begin anew.
        """
        queues = self.queues
        for entry in [*plan, *(after or [])]:
            queues.memory.unreserve(entry.save)
        if len(plan) > 1:
            queues.suspects = deque(queues.running)
            for sequence in reversed(queues.suspects):
                queues.preempt(sequence)
            return []
        sequence = plan[0].sequence
        spoilt = {entry.sequence for entry in after or []} - {sequence}
        for other in reversed([one for one in queues.running if one in spoilt]):
            queues.preempt(other)
        if sequence not in queues.running:
            return []  # it has ended meanwhile
        queues.end(sequence)
        return [sequence.failure(error)]

    def take_pages_to_clear(self) -> list[int]:
        """Free pages that may hold numbers that are not finite; to be cleared before the next step."""
        return self._committer.take_pages_to_clear()

    def fail_all(self, error: str) -> list[TokenOutput]:
        """End every sequence with an error that a retry may escape; nothing is left behind."""
        outputs: list[TokenOutput] = []
        for sequence in [*self.running, *self.waiting]:
            self.queues.memory.release(sequence)
            outputs.append(msgspec.structs.replace(sequence.failure(error), retry=True))
        self.queues.suspects.clear()
        self.running.clear()
        self.waiting.clear()
        return outputs

    def check_idle(self) -> None:
        """Integrity: when nothing runs, nobody may hold a page."""
        assert not self.idle or self.pages.free == self.pages.total, "pages leaked"
