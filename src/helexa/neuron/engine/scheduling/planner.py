"""The planner: chooses the tokens that the next step computes.

Prompts are prefilled in the order of arrival. If a prompt does not fit into a step, the step computes only a chunk of
it. Half of the prompt tokens left in this step then go to other prompts, the shortest first. A short prompt thus does
not wait for the end of a long prompt. The oldest prompt gets at least half of the prompt tokens of every step.

If several principals (API key owners) have sequences, the first sequence of each principal comes first, then the second
sequence of each principal, and so on. A step may then omit some of the decoding sequences (see `step_controller`).

An image is encoded before the step that computes its first token. The images that begin in a step have at most as many
tokens as the token budget, except if a single image has more.
"""

from collections import Counter, deque
from collections.abc import Iterator

from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.scheduling.overlap import foreseeable
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.prompt_images import PromptImages
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_controller import StepController, StepLimits
from helexa.neuron.ops.constants import MAX_DRAFTS


class Planner:
    """Plans steps within the limits of a step controller, and reports the durations of steps to the controller.

    Args:
        most_tokens: maximum number of tokens of a sequence, limited by the context length and the KV cache size.
    """

    def __init__(self, options: EngineOptions, queues: Queues, most_tokens: int, controller: StepController) -> None:
        self._options = options
        self._queues = queues
        self._memory = queues.memory
        self._most_tokens = most_tokens
        self._controller = controller
        self._suspect_turn = False  # whether the next step is for a suspect
        self._ahead = False  # whether the plan is made before the previous step is committed
        self._left_out = False  # whether the last plan omits a sequence because too few pages are free
        self._image_tokens = 0  # tokens of the images that begin in the plan
        self._room: int | None = None  # `Memory.room` of the running sequences; None until the plan needs it
        self._most_drafting = options.speculation_max_sequences if options.speculation else 0

    def plan(self) -> Plan:
        """Return the plan of the next step: tokens of decoding sequences, then prompt tokens up to the budget.

        Prompts get the part of the token budget that the decoding sequences leave, at least one token. A plan omits
        some decoding sequences if fair share among principals requires this, or after a failed step (see
        `Scheduler.isolate`).
        """
        self._left_out = False
        if self._queues.suspects:
            self._suspect_turn = not self._suspect_turn
            if not self._suspect_turn and (plan := self._plan_together()):
                return plan
            if suspect_plan := self._plan_suspect():
                return suspect_plan
            self._queues.suspects.clear()
        return self._plan_together()

    def plan_after(self) -> Plan:
        """Return the plan of the step that follows the step in flight, before that step's results are known.

        This method must be called within `overlap.as_after`. The plan may be empty. The planner preempts no sequence
        for this plan. It omits sequences that need a new page if no page is free. After such an omission, `foresees`
        returns False until the next call of `plan`.
        """
        self._ahead = True
        try:
            return self._plan_together()
        finally:
            self._ahead = False

    def foresees(self, plan: Plan) -> bool:
        """Return whether `plan_after` may be called before the step of `plan` is committed.

        This is the case if the next plan does not depend on the tokens that the step of `plan` samples.
        """
        if self._queues.suspects or self._left_out or not foreseeable(plan):
            return False
        decoding = [entry.sequence for entry in plan if entry.samples]
        return len(decoding) > self._most_drafting or not any(
            self._drafter(sequence).may_draft for sequence in decoding
        )

    def expected_seconds(self, plan: Plan) -> float:
        """Return the expected duration of the step of `plan`, in seconds; 0 if it is unknown."""
        return self._controller.expected_seconds(sum(entry.count + len(entry.drafts) for entry in plan))

    def learn(self, plan: Plan, seconds: float) -> None:
        """Record that the step of `plan` took `seconds`.

        The step controller uses the duration to limit later steps. For a prefill-only step, the duration is also added
        to the prefill statistics of its sequences (see `Timing`).
        """
        by_principal: Counter[str] = Counter()
        for entry in plan:
            if not entry.decoding:
                by_principal[entry.sequence.principal] += entry.count
        prompts = by_principal.total()
        rows = sum(entry.count + len(entry.drafts) for entry in plan if entry.decoding)
        self._controller.learn(rows, by_principal, seconds)
        if not rows:
            for entry in plan:
                entry.sequence.read_tokens += entry.count
                entry.sequence.read_seconds += seconds * entry.count / prompts

    def _plan_together(self) -> Plan:
        """Return a plan that computes all kinds of sequences together.

        If there are suspects, the plan contains only decoding sequences that are not suspects. Suspects are sequences
        that may have caused a step to fail (see `Scheduler.isolate`).
        """
        plan: dict[Sequence, int] = {}
        self._image_tokens = 0
        self._room = None
        limits = self._controller.limits(self._queues.running.values(), self._queues.waiting.counts)
        decoding = [
            sequence
            for sequence in self._queues.running.values()
            if sequence.decoding and sequence not in self._queues.suspects and not self._ends(sequence)
        ]
        for sequence in self._controller.choose(decoding, limits.rows):
            self._place(sequence, sequence.pending, plan)
        if not self._queues.suspects:
            self._add_prompts(plan, limits)
            if not plan:
                self._add_prompts(plan, StepLimits())
        drafts: dict[Sequence, tuple[tuple[int, ...], Drafter | None]] = {}
        if len(decoding) <= self._most_drafting and not self._ahead:
            remaining = self._options.max_step_tokens - sum(plan.values())
            for sequence in decoding:
                if sequence in plan and sequence.decoding:  # False if it was preempted and restarted
                    drafts[sequence] = self._draft(sequence, remaining)
                    remaining -= len(drafts[sequence][0])
        return [self._entry(sequence, count, *drafts.get(sequence, ((), None))) for sequence, count in plan.items()]

    def _plan_suspect(self) -> Plan:
        """Return a plan with one suspect, the next in rotation. The plan is empty if no suspect gets enough pages.

        Suspects are sequences that may have caused a step to fail (see `Scheduler.isolate`).
        """
        plan: dict[Sequence, int] = {}
        self._image_tokens = 0
        self._room = None
        for _ in range(len(self._queues.suspects)):
            sequence = self._queues.suspects[0]
            self._queues.suspects.rotate(-1)
            if sequence.id not in self._queues.running:
                if sequence is not self._queues.waiting.first:
                    continue  # an older sequence was preempted
                self._queues.start(sequence, self._memory.computed_before(sequence))
            if self._place(sequence, min(sequence.pending, self._controller.max_prompt_tokens), plan):
                break
        return [self._entry(sequence, count, (), None) for sequence, count in plan.items()]

    def _add_prompts(self, plan: dict[Sequence, int], limits: StepLimits) -> None:
        """Add prompts or chunks of prompts to `plan`, within `limits` and the token budget."""
        width = min(len(self._queues.running) + len(self._queues.waiting), self._options.max_sequences)
        remaining = self._controller.prompt_tokens(sum(plan.values()), len(plan), width, limits)
        prompts = self._prompts(limits)
        while remaining > 0 and (sequence := next(prompts, None)):
            sequence_limit = limits.tokens_for(sequence)
            if sequence.pending > remaining and sequence_limit >= remaining:
                limits.widen(sequence, remaining // 2)
                remaining -= self._add_shortest(remaining // 2, sequence, plan, limits)
                self._place(sequence, remaining, plan)
                break
            remaining -= self._take(sequence, min(sequence.pending, sequence_limit, remaining), plan, limits)

    def _prompts(self, limits: StepLimits) -> Iterator[Sequence]:
        """Yield the sequences to prefill: first running sequences, then waiting sequences, each in order of arrival.

        A waiting sequence moves to the running sequences when it is yielded. If several principals have sequences, the
        first sequence of each principal comes first, whether it is running or waiting.
        """
        sequence_counts: Counter[str] = Counter()
        prefilling: deque[tuple[int, Sequence]] = deque()
        for sequence in self._queues.running.values():
            if not sequence.decoding:
                prefilling.append((sequence_counts[sequence.principal], sequence))
            sequence_counts[sequence.principal] += 1
        prefilling = deque(sorted(prefilling, key=lambda pair: pair[0]))
        memory_full = False
        while True:
            newcomer = None if memory_full else self._newcomer(sequence_counts, limits)
            if newcomer is not None and (not prefilling or sequence_counts[newcomer.principal] < prefilling[0][0]):
                if not self._start(newcomer):
                    memory_full = True
                    continue
                sequence_counts[newcomer.principal] += 1
                yield newcomer
            elif prefilling:
                _, sequence = prefilling.popleft()
                if limits.tokens_for(sequence):
                    yield sequence
            else:
                return

    def _newcomer(self, places: Counter[str], limits: StepLimits) -> Sequence | None:
        """Return the waiting sequence that should start next, or None if no waiting sequence may start.

        This is a sequence of the principal with the fewest running sequences. If several sequences qualify, it is the
        oldest.

        Args:
            places: number of running sequences by principal.
            limits: limits of the step. A sequence that gets no prompt tokens may not start.
        """
        candidates = (sequence for sequence in self._queues.waiting.firsts() if limits.tokens_for(sequence))
        return min(candidates, key=lambda sequence: (places[sequence.principal], sequence.place), default=None)

    def _add_shortest(self, budget: int, cut: Sequence, plan: dict[Sequence, int], limits: StepLimits) -> int:
        """Add up to `budget` tokens of prompts other than `cut` to `plan`, the shortest prompts first.

        Args:
            cut: the prompt of which only a chunk fits into the step.

        Returns:
            The number of added tokens.
        """
        remaining = budget
        shortest = self._shortest(cut, plan, limits)
        while remaining > 0 and (sequence := next(shortest, None)):
            remaining -= self._take(
                sequence, min(sequence.pending, remaining, limits.tokens_for(sequence)), plan, limits
            )
        return budget - remaining

    def _shortest(self, cut: Sequence, plan: dict[Sequence, int], limits: StepLimits) -> Iterator[Sequence]:
        """Yield the prompts other than `cut` that are not in `plan`. The shortest remaining prompt comes first.

        A waiting prompt moves to the running sequences when it is yielded. If too few pages are free for the first
        prompt in the waiting queue, no waiting prompt starts. Otherwise shorter prompts could take the pages that the
        first prompt needs.
        """
        prefilling = [
            other
            for other in self._queues.running.values()
            if not other.decoding and other is not cut and other not in plan
        ]
        first = self._queues.waiting.first
        may_start = first is not None and self._may_start(first)
        missing = self._memory.missing(self._queues.waiting) if may_start else {}
        for sequence in sorted([*prefilling, *missing], key=lambda prompt: missing.get(prompt, prompt.pending)):
            if not limits.tokens_for(sequence):
                continue
            if sequence in missing and not self._start(sequence, sequence.matched):
                continue
            yield sequence

    def _start(self, sequence: Sequence, limit: int | None = None) -> bool:
        """Move a waiting sequence to the running sequences. Return False if it cannot start now.

        Args:
            limit: see `_may_start`.
        """
        if not self._may_start(sequence, limit):
            return False
        prefix = self._memory.computed_before(sequence)
        pages = self._memory.pages_to_start(sequence, prefix)
        if pages > self._free_room():
            return False
        self._room = self._free_room() - pages
        self._queues.start(sequence, prefix)
        return True

    def _may_start(self, sequence: Sequence, limit: int | None = None) -> bool:
        """Return False if `max_sequences` sequences are running, or if too few pages are free to start `sequence`.

        Args:
            limit: number of leading pages to look up in the prefix cache at most; None for all full pages.
        """
        if len(self._queues.running) >= self._options.max_sequences:
            return False
        return self._memory.may_fit(sequence, self._free_room(), limit)

    def _free_room(self) -> int:
        """Return `Memory.room` of the running sequences. Each plan computes it once, and again after preemptions."""
        if self._room is None:
            self._room = self._memory.room(self._queues.running.values())
        return self._room

    def _take(self, sequence: Sequence, count: int, plan: dict[Sequence, int], limits: StepLimits) -> int:
        """Add up to `count` tokens of a prompt to `plan`, and subtract them from `limits`.

        Returns:
            The number of added tokens.
        """
        planned = self._place(sequence, count, plan)
        limits.take(sequence, planned)
        return planned

    def _place(self, sequence: Sequence, count: int, plan: dict[Sequence, int]) -> int:
        """Add up to `count` tokens of a sequence to `plan`, and allocate their pages.

        If too few pages are free, the newest sequences are preempted. Within `plan_after`, no sequence is preempted.

        Returns:
            The number of added tokens. It is 0 if no pages are left, if the sequence itself is preempted, or if an
            image must wait for the next step. It is larger than `count` if an image must be computed in one step.
        """
        if sequence.id not in self._queues.running:
            return 0  # preempted in this plan for an older sequence
        count = self._memory.until_mark(sequence, count)
        if sequence.images is not None and (count := self._until_image(sequence, sequence.images, count)) == 0:
            return 0
        while not self._memory.grow(sequence, count):
            if self._ahead:
                self._left_out = True
                return 0
            victim = next(reversed(self._queues.running.values()))
            plan.pop(victim, None)
            self._room = None
            self._queues.preempt(victim)
            if victim is sequence:
                return 0
        plan[sequence] = count
        return count

    def _until_image(self, sequence: Sequence, images: PromptImages, count: int) -> int:
        """Return how many of the next `count` tokens of a sequence the step may compute, because of its images."""
        computed = sequence.computed
        for start, tokens in images.begun(computed, computed + count):
            if self._image_tokens and self._image_tokens + tokens > self._options.max_step_tokens:
                return start - computed
            self._image_tokens += tokens
        return images.chunk_end(computed, computed + count) - computed

    def _entry(self, sequence: Sequence, count: int, drafts: tuple[int, ...], drafter: Drafter | None) -> PlanEntry:
        restore = self._memory.take_restore(sequence)
        save = self._memory.place_for_snapshot(sequence, sequence.computed + count)
        return PlanEntry(sequence, count, drafts, restore, save, drafter)

    def _draft(self, sequence: Sequence, budget: int) -> tuple[tuple[int, ...], Drafter | None]:
        """Return draft tokens for a planned sequence, and allocate their pages.

        There are at most `budget` drafts. If too few pages are free, there are none.

        Returns:
            The drafts, and the drafter that made them. The drafter is None if the grammar forces the drafts.
        """
        tokens_left = min(self._tokens_left(sequence), sequence.request.max_tokens - sequence.generated)
        limit = min(budget, tokens_left - 1, MAX_DRAFTS)  # the last token is sampled, so it needs no draft
        if limit <= 0:
            return (), None
        drafts, drafter = () if sequence.matcher is None else sequence.matcher.forced(limit), None
        if not drafts:
            drafter = self._drafter(sequence)
            drafts = drafter.draft(limit)
            if sequence.matcher is not None:
                drafts = sequence.matcher.fitting(drafts)
        if not drafts or not self._memory.grow(sequence, sequence.pending + len(drafts)):
            return (), None
        return drafts, drafter

    @staticmethod
    def _drafter(sequence: Sequence) -> Drafter:
        sequence.drafter = sequence.drafter or Drafter(sequence.tokens)
        return sequence.drafter

    def _ends(self, sequence: Sequence) -> bool:
        """Return whether the token that the step in flight samples ends the sequence because of a length limit.

        Outside `plan_after`, the result is False.
        """
        return self._ahead and (sequence.generated >= sequence.request.max_tokens or self._tokens_left(sequence) <= 0)

    def _tokens_left(self, sequence: Sequence) -> int:
        return self._most_tokens - len(sequence.tokens)
