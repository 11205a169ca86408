"""Scheduler: which sequences advance by how many tokens in the next step.

Each sequence has a list of `tokens`. The first `computed` tokens are computed. The plan of a step is a list of pairs
(sequence, n): the step computes the next n tokens of the sequence. The sum of all n stays within the token budget.
Pairs of this kind describe every case:

* Decode: n is 1.
* Prefill: n is the length of a chunk of the prompt.
* Cached prefix: `computed` starts at the length of the prefix.
* Preemption: `computed` returns to 0, and the sequence returns to the head of the waiting queue.

(The scheduler of vLLM V1 works in the same way. KV pages are described by Kwon et al., 2023.)

The newest sequence is preempted first. An older sequence is never preempted for a newer one. The module
`planning_and_preemption` plans steps, and the module `draft_acceptance_and_commit` applies the results of the steps.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Drafts, Logprob, TokenOutput
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool, new_chain
from helexa.neuron.engine.scheduling.draft_acceptance_and_commit import Committer
from helexa.neuron.engine.scheduling.draft_length import DraftLimits
from helexa.neuron.engine.scheduling.page_allocation_and_prefix_hits import Memory
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.planning_and_preemption import Planner
from helexa.neuron.engine.scheduling.prompt_images import TEXT_TRAITS, ImageTraits, PromptImages
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_limits_and_fair_share import StepController
from helexa.neuron.engine.step_input_and_graph_sizes import Float32


class Scheduler:
    """Owns all sequences of an engine and their KV pages; plans and commits steps.

    Args:
        options: token budgets and limits.
        pages: the page pool. A sequence can be at most as long as the whole pool.
        states: the state pool; None for a model without recurrent layers. A cached prefix is usable only up to its last
            snapshot.
        controller: limits the size of steps; None for a new `StepController` without a limit from a hang timeout.
        image_traits: how the model treats the image tokens of prompts.
        window: largest sliding window of the layers, in positions; None if a sequence must keep all parts of its KV
            pages.
        drafts: limits of the draft model; None without a draft model.
    """

    def __init__(
        self,
        options: EngineOptions,
        pages: PagePool,
        states: StatePool | None = None,
        controller: StepController | None = None,
        image_traits: ImageTraits = TEXT_TRAITS,
        window: int | None = None,
        drafts: DraftLimits | None = None,
    ) -> None:
        self.options = options
        self._image_traits = image_traits
        self.pages = pages
        self.states = states
        self.window = window
        capacity = pages.total * pages.page_size
        self._most_tokens = min(options.context_length or capacity, capacity)
        self.queues = Queues(Memory(pages, states, options.prefix_reuse, window))
        controller = controller or StepController(options)
        self._has_draft_model = drafts is not None
        self.planner = Planner(options, self.queues, self._most_tokens, controller, drafts)
        self.committer = Committer(self.queues, self._most_tokens, recurrent=states is not None)
        self._arrivals = itertools.count()

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold pages, sorted by arrival."""
        return list(self.queues.running.values())

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that have not started or were preempted, in the order of the queue."""
        return list(self.queues.waiting)

    @property
    def idle(self) -> bool:
        """Whether no sequence runs or waits."""
        return not self.queues.running and not self.queues.waiting

    def add(self, sequence: Sequence) -> TokenOutput | None:
        """Queue a new sequence and return None, or return the error of a rejection."""
        rejection = self.check(sequence)
        if rejection is None:
            self.enqueue(sequence)
        return rejection

    def check(self, sequence: Sequence) -> TokenOutput | None:
        """Prepare a sequence for `enqueue` and return None, or return a rejection."""
        if len(self.queues.waiting) >= self.options.max_waiting:
            return sequence.failure(
                f"overloaded: {len(self.queues.waiting)} requests already wait for the model; try again later"
            )
        if not sequence.tokens:
            return sequence.failure("the prompt has no tokens; send some text")
        # One output token is included, because the sequence could never continue without the page of this token.
        needed = self.pages.pages_for(len(sequence.tokens) + 1)
        if needed > self.pages.total:
            return sequence.failure(
                f"the prompt has {len(sequence.tokens)} tokens, and with an answer needs more than the KV cache "
                f"of {self.pages.total * self.pages.page_size} tokens; shorten the prompt"
            )
        if len(sequence.tokens) > self._most_tokens:
            return sequence.failure(
                f"the prompt has {len(sequence.tokens)} tokens, but the context has {self.options.context_length}; "
                "shorten the prompt"
            )
        if sequence.request.image_ranges:
            sequence.images = PromptImages(sequence.request, self._image_traits)
        # The salt separates the prefix caches of principals.
        sequence.chain = new_chain(sequence.request.salt if self.options.prefix_reuse == "principal" else "")
        return None

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence that `check` has accepted to the waiting queue."""
        sequence.arrival = next(self._arrivals)
        self.queues.waiting.append(sequence)

    def cancel(self, sequence_id: int) -> bool:
        """Remove a sequence and free its pages; return False if there is no such sequence."""
        return self.queues.cancel(sequence_id)

    def clear_prefixes(self) -> None:
        """Forget all cached prefixes. Running sequences keep their pages."""
        self.pages.clear()
        if self.states is not None:
            self.states.clear()
        self.queues.recent.clear()

    def plan(self) -> Plan:
        """Plan the next step (see `Planner.plan`)."""
        return self.planner.plan()

    def plan_after(self) -> Plan:
        """Plan the step after the one in flight (see `Planner.plan_after`)."""
        return self.planner.plan_after()

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
                sampled tokens: one after its known tokens, and one after each draft. The value `NON_FINITE` ends the
                sequence with an error, and removes its KV pages from the prefix cache.
            seconds: duration of the step; None if the planner must not learn from the step.
            logprobs: log-probabilities of the sampled tokens, by index in `sampled`, for sequences that request them.
            hidden: sums or maxima of the hidden states of this step, float32 [H] (H: hidden size), by sequence id, for
                embedding requests.
            scores: log-probabilities of prompt tokens that this step has computed, in prompt order, by sequence id.
        """
        if seconds is not None:
            self.planner.learn(plan, seconds)
        return self.committer.commit(plan, sampled, logprobs, hidden, scores)

    def isolate(self, plan: Plan, error: str, after: Plan | None = None) -> list[TokenOutput]:
        """Find the sequence that made a step fail, and return its error output, if found.

        A sequence that was alone in the step ends with `error`. If the step had several sequences, all running
        sequences become suspects (see `Queues.suspects`), and the result is empty. The result is also empty if the
        sequence has ended since the launch.

        Args:
            after: the plan of the step that was launched after the failed step; None if there is none. The results of
                the later step are dropped, and its sequences restart.
        """
        queues = self.queues
        for entry in [*plan, *(after or [])]:
            queues.memory.unreserve(entry.save)
        if len(plan) > 1:
            # Any of these sequences may be the cause. Each is computed alone until it samples a token or fails.
            queues.suspects = deque(queues.running.values())
            # Each sequence moves to the head of the queue. The oldest sequence moves last, so it is then the first.
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

    def fail_all(self, error: str) -> list[TokenOutput]:
        """End all sequences with a retryable error, and return the error outputs."""
        outputs: list[TokenOutput] = []
        for sequence in [*self.running, *self.waiting]:
            self.queues.memory.release(sequence)
            outputs.append(msgspec.structs.replace(sequence.failure(error), retry=True))
        self.queues.suspects.clear()
        self.queues.running.clear()
        self.queues.waiting.clear()
        return outputs

    def drafts(self) -> Drafts:
        """Return the numbers of verified and accepted drafts so far, and the current gain."""
        ngrams, models = self.committer.ngram_drafts, self.committer.model_drafts
        gain = self.planner.gate.gain if self._has_draft_model else 0.0
        return Drafts(ngrams.drafted, ngrams.accepted, models.drafted, models.accepted, gain)

    def check_idle(self) -> None:
        """Assert that an idle scheduler without a step in flight has freed all memory."""
        if self.idle:
            assert self.pages.free == self.pages.total, "pages leaked"
            windows = self.pages.windows
            assert windows is None or windows.free == windows.total, "window pages leaked"
            assert self.states is None or self.states.idle, "state slots leaked"
