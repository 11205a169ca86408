"""The scheduler: decides which sequences advance by how many tokens in the next step.

Each sequence has a list of `tokens`, of which the first `computed` are computed. A step is a plan of (sequence, n):
compute the next n tokens of the sequence. All n together stay within one token budget. Every case is such a plan:

* Decode: n = 1.
* Prefill: n is the length of a chunk of the prompt.
* Cached prefix: `computed` starts at the length of the prefix.
* Preemption: `computed` returns to 0, and the sequence goes to the head of the queue.

(The rule is the rule of vLLM V1; the KV pages follow Kwon et al., 2023.)

The newest sequence is preempted first; an older sequence is never preempted for a newer one. `planner` plans steps, and
`committer` applies their results.
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
    """Owns all sequences of an engine and their KV pages, plans steps and applies the results.

    Args:
        options: token budgets and limits.
        pages: the page pool. A sequence can be at most as long as the whole pool.
        states: the state pool; None for a model without recurrent layers. Recurrent state cannot be rolled back, so
            drafts do not change it, and accepted drafts are computed again with the next token. A cached prefix can be
            used up to the last snapshot in it.
        controller: limits the size of steps; None for a controller without a time limit.
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
        """Sequences without pages, which have not started or were preempted, sorted by arrival."""
        return self.queues.waiting

    @property
    def idle(self) -> bool:
        """Whether no sequence runs or waits."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> TokenOutput | None:
        """Queue a new sequence and return None, or return an error output if the sequence is rejected."""
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
        """Remove the sequence `sequence_id` and free its pages; return False if the scheduler does not have it."""
        return self.queues.cancel(sequence_id)

    def plan(self) -> Plan:
        """Return the plan of the next step: decoding sequences first, then prompt tokens up to the token budget."""
        return self.planner.plan()

    def plan_after(self) -> Plan:
        """Return the plan of the step after the step in flight, before its commit. Call within `overlap.as_after`."""
        return self.planner.plan_after()

    def foresees(self, plan: Plan) -> bool:
        """Return whether `plan_after` may be called while the step of `plan` is in flight."""
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
        """Apply the results of a finished step, and return the new outputs.

        Args:
            sampled: the sampled tokens of all plan entries that sample, in plan order. An entry with d drafts has d + 1
                tokens: the token after its known tokens, and the token after each draft. The token after a draft counts
                only if this draft and all drafts before it are accepted. Random draws depend only on seed and position,
                so the accepted tokens are the tokens of a run without drafts. `NON_FINITE` ends the sequence and
                unregisters its pages.
            seconds: duration of the step; None if the planner must not learn from the step.
            logprobs: log-probabilities of sampled tokens, by index in `sampled`, for sequences that request them.
            hidden: sums of the step's hidden states, float32 [H], by sequence id, for sequences to be embedded.
            scores: log-probabilities of the next prompt tokens, by sequence id, for sequences that request them.
        """
        if seconds is not None:
            self.planner.learn(plan, seconds)
        return self._committer.commit(plan, sampled, logprobs, hidden, scores)

    def isolate(self, plan: Plan, error: str, after: Plan | None = None) -> list[TokenOutput]:
        """Find the sequence that caused a failed step, and return the new outputs.

        If the step had one sequence, this sequence ends with `error`. If the step had several sequences, all running
        sequences restart as suspects. Each suspect is computed in steps without other sequences until it samples a
        token or fails.

        Args:
            plan: the plan of the failed step.
            after: the plan of the step that was launched after the failed step. Its results are dropped, and its
                sequences restart.
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
        next_sequences = {entry.sequence for entry in after or []} - {sequence}
        for other in reversed([candidate for candidate in queues.running if candidate in next_sequences]):
            queues.preempt(other)
        if sequence not in queues.running:
            return []  # the sequence ended after the launch
        queues.end(sequence)
        return [sequence.failure(error)]

    def take_pages_to_clear(self) -> list[int]:
        """Return and forget the free KV pages that may contain NaN or inf. The caller must clear them before a step."""
        return self._committer.take_pages_to_clear()

    def fail_all(self, error: str) -> list[TokenOutput]:
        """End every sequence with a retryable error, and release all memory."""
        outputs: list[TokenOutput] = []
        for sequence in [*self.running, *self.waiting]:
            self.queues.memory.release(sequence)
            outputs.append(msgspec.structs.replace(sequence.failure(error), retry=True))
        self.queues.suspects.clear()
        self.running.clear()
        self.waiting.clear()
        return outputs

    def check_idle(self) -> None:
        """Assert that no page is held when the scheduler is idle."""
        assert not self.idle or self.pages.free == self.pages.total, "pages leaked"
