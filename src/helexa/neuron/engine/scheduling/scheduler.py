"""The scheduler: decides which sequences advance by how many tokens in the next step.

Each sequence has a list of `tokens`. The first `computed` tokens are computed. The plan of a step is a list of pairs
(sequence, n): the step computes the next n tokens of the sequence. The sum of all n stays within the token budget. Such
a plan covers every case:

* Decode: n is 1.
* Prefill: n is the length of a chunk of the prompt.
* Cached prefix: `computed` starts at the length of the prefix.
* Preemption: `computed` returns to 0, and the sequence returns to the head of the waiting queue.

(The scheduler of vLLM V1 works in the same way. KV pages are described by Kwon et al., 2023.)

The newest sequence is preempted first. An older sequence is never preempted for a newer one. The module `planner` plans
steps, and the module `committer` applies the results of the steps.
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
from helexa.neuron.engine.scheduling.prompt_images import TEXT_TRAITS, ImageTraits, PromptImages
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.sequence_memory import Memory
from helexa.neuron.engine.scheduling.step_controller import StepController
from helexa.neuron.engine.step.step_input import Float32


class Scheduler:
    """Owns all sequences of an engine and their KV pages. It plans steps, and applies the results of the steps.

    Args:
        options: token budgets and limits.
        pages: the page pool. A sequence can be at most as long as the whole pool.
        states: the state pool; None for a model without recurrent layers. Recurrent state cannot be rolled back. Drafts
            therefore do not change the state, and accepted drafts are computed again in the next step. A cached prefix
            is usable only up to its last snapshot.
        controller: limits the size of steps; None for a new `StepController` without a limit from a hang timeout.
        image_traits: how the model treats the image tokens of prompts.
    """

    def __init__(
        self,
        options: EngineOptions,
        pages: PagePool,
        states: StatePool | None = None,
        controller: StepController | None = None,
        image_traits: ImageTraits = TEXT_TRAITS,
    ) -> None:
        self.options = options
        self._image_traits = image_traits
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
        return list(self.queues.running.values())

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences without pages, in the order of the queue. They have not started, or they were preempted."""
        return list(self.queues.waiting)

    @property
    def idle(self) -> bool:
        """Whether no sequence runs or waits."""
        return not self.queues.running and not self.queues.waiting

    def add(self, sequence: Sequence) -> TokenOutput | None:
        """Add a new sequence to the waiting queue, and return None.

        If the sequence is rejected, return an output with the error. A sequence is rejected if the queue is full, or if
        its prompt is empty or too long.
        """
        if len(self.queues.waiting) >= self.options.max_waiting:
            return sequence.failure(f"overloaded: {len(self.queues.waiting)} requests are waiting already")
        if not sequence.tokens:
            return sequence.failure("the prompt has no tokens")
        needed = self.pages.pages_for(len(sequence.tokens) + 1)
        if needed > self.pages.total:
            return sequence.failure(f"the prompt needs {needed} KV pages, the cache has {self.pages.total}")
        if len(sequence.tokens) > self._most_tokens:
            return sequence.failure(f"the prompt is longer than the context of {self.options.context_length}")
        if sequence.request.image_ranges:
            sequence.images = PromptImages(sequence.request, self._image_traits)
        sequence.chain = page_hash.chain_of(sequence.request.salt if self.options.prefix_reuse == "principal" else "")
        sequence.arrival = next(self._arrivals)
        self.queues.waiting.append(sequence)
        return None

    def cancel(self, sequence_id: int) -> bool:
        """Remove the sequence `sequence_id` and free its pages. Return False if there is no such sequence."""
        return self.queues.cancel(sequence_id)

    def plan(self) -> Plan:
        """Return the plan of the next step: decoding sequences first, then prompt tokens up to the token budget."""
        return self.planner.plan()

    def plan_after(self) -> Plan:
        """Return the plan of the step that follows the step in flight, before that step is committed.

        This method must be called within `overlap.as_after`.
        """
        return self.planner.plan_after()

    def foresees(self, plan: Plan) -> bool:
        """Return whether `plan_after` may be called before the step of `plan` is committed."""
        return self.planner.foresees(plan)

    def expected_seconds(self, plan: Plan) -> float:
        """Return the expected duration of the step of `plan`, in seconds; 0 if it is unknown."""
        return self.planner.expected_seconds(plan)

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
                sampled tokens: one after its known tokens, and one after each draft. The token after a draft is used
                only if this draft and all earlier drafts of the entry are accepted. Random draws depend only on seed
                and position, so the output is the same as without drafts. The value `NON_FINITE` ends the sequence with
                an error and unregisters its pages.
            seconds: duration of the step; None if the planner must not learn from the step.
            logprobs: log-probabilities of the sampled tokens, by index in `sampled`, for sequences that request them.
            hidden: sums of the hidden states of this step, float32 [H] (H: hidden size), by sequence id, for embedding
                requests.
            scores: log-probabilities of prompt tokens that this step has computed, in prompt order, by sequence id.
                Only sequences that set `prompt_logprobs` have them.
        """
        if seconds is not None:
            self.planner.learn(plan, seconds)
        return self._committer.commit(plan, sampled, logprobs, hidden, scores)

    def isolate(self, plan: Plan, error: str, after: Plan | None = None) -> list[TokenOutput]:
        """Handle a failed step so that only the sequence that causes the failure ends. Return the new outputs.

        If the step had one sequence, this sequence ends with `error`. If the step had several sequences, all running
        sequences restart as suspects. Each suspect is computed in steps without other sequences until it samples a
        token or fails.

        Args:
            plan: the plan of the failed step.
            error: the error message.
            after: the plan of the step that was launched after the failed step; None if there is none. The results of
                the later step are dropped, and its sequences restart.
        """
        queues = self.queues
        for entry in [*plan, *(after or [])]:
            queues.memory.unreserve(entry.save)
        if len(plan) > 1:
            queues.suspects = deque(queues.running.values())
            for sequence in reversed(queues.suspects):
                queues.preempt(sequence)
            return []
        sequence = plan[0].sequence
        next_sequences = {entry.sequence for entry in after or []} - {sequence}
        for other in reversed([candidate for candidate in queues.running.values() if candidate in next_sequences]):
            queues.preempt(other)
        if sequence.id not in queues.running:
            return []  # the sequence ended after the launch
        queues.end(sequence)
        return [sequence.failure(error)]

    def take_pages_to_clear(self) -> list[int]:
        """Return the free KV pages that may contain NaN or infinity, and clear the list of these pages.

        The caller must set the contents of the pages to zero before the next step.
        """
        return self._committer.take_pages_to_clear()

    def fail_all(self, error: str) -> list[TokenOutput]:
        """End all sequences with a retryable error, release their memory, and return the error outputs."""
        outputs: list[TokenOutput] = []
        for sequence in [*self.running, *self.waiting]:
            self.queues.memory.release(sequence)
            outputs.append(msgspec.structs.replace(sequence.failure(error), retry=True))
        self.queues.suspects.clear()
        self.queues.running.clear()
        self.queues.waiting.clear()
        return outputs

    def check_idle(self) -> None:
        """Assert that all pages and state slots are free if the scheduler has no sequences.

        The caller must not call this method while a step is in flight.
        """
        if self.idle:
            assert self.pages.free == self.pages.total, "pages leaked"
            assert self.states is None or self.states.idle, "state slots leaked"
