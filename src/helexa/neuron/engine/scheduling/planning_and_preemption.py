"""The planner: chooses the tokens that the next step computes.

Prompts are prefilled in the order of arrival. If a prompt does not fit into a step, the step computes only a chunk of
it. Half of the prompt tokens left in this step then go to other prompts, the shortest first. A short prompt thus does
not wait for the end of a long prompt. The oldest prompt gets at least half of the prompt tokens of every step.

If several principals (API key owners) have sequences, the first sequence of each principal comes first, then the second
sequence of each principal, and so on. A step may then omit some of the decoding sequences (see
`step_limits_and_fair_share`).

An image is encoded before the step that computes its first token. The images that begin in a step have at most as many
tokens as the token budget, except if a single image has more.
"""

from collections import Counter, deque
from collections.abc import Iterator

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.scheduling.draft_length import Candidate, DraftGate, DraftLimits, ModelDrafter
from helexa.neuron.engine.scheduling.ngrams_and_counts import Drafter
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry, allows_planning_ahead
from helexa.neuron.engine.scheduling.prompt_images import PromptImages
from helexa.neuron.engine.scheduling.queues import Queues
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_limits_and_fair_share import StepController, StepLimits
from helexa.neuron.ops.kernel_header import MAX_DRAFTS


class Planner:
    """Plans steps within the limits of a step controller, which learns from the steps."""

    def __init__(
        self,
        options: EngineOptions,
        queues: Queues,
        most_tokens: int,
        controller: StepController,
        drafts: DraftLimits | None = None,
    ) -> None:
        self._options = options
        self._queues = queues
        self._memory = queues.memory
        # maximum number of tokens of a sequence, limited by the context length and the KV cache size
        self._most_tokens = most_tokens
        self._controller = controller
        self._suspect_turn = False  # whether the last plan was for a suspect (see `Queues.suspects`)
        self._ahead = False  # whether the plan is made before the previous step is committed
        self._left_out = False  # whether the last plan omits a sequence because too few pages are free
        self._image_tokens = 0  # tokens of the images that begin in the plan
        self._room: int | None = None  # `Memory.room` of the running sequences; None until the plan needs it
        # maximum number of decoding sequences in a step with drafts
        self._most_drafting = options.speculation_max_sequences if options.speculation else 0
        self._draft_limits = drafts
        self.gate = DraftGate(1.0 if drafts is None else drafts.ratio, options.step_timing == "fixed")

    def plan(self) -> Plan:
        """Plan the next step: decode tokens, then prompt tokens up to the budget.

        Waiting sequences are started, and running ones preempted if pages are missing. Prompts get the tokens that
        `StepController.prompt_tokens` allows. If there are suspects, the step may be for one of them alone. The plan
        may be empty.
        """
        self._left_out = False
        if self._queues.suspects:
            # Steps of suspects alternate with steps of the other sequences, so that suspects do not stop the others.
            self._suspect_turn = not self._suspect_turn
            if not self._suspect_turn and (plan := self._plan_together()):
                return plan
            if suspect_plan := self._plan_suspect():
                return suspect_plan
            self._queues.suspects.clear()
        return self._plan_together()

    def plan_after(self) -> Plan:
        """Plan the step after the step in flight, whose results are not known yet.

        The caller must have entered the context `as_after` with the plan of the step in flight. The plan may be empty.
        If no page is free, the plan omits sequences that need a new page, and `may_plan_ahead` returns False until the
        next call of `plan`.
        """
        self._ahead = True
        try:
            return self._plan_together()
        finally:
            self._ahead = False

    def may_plan_ahead(self, plan: Plan) -> bool:
        """Return whether `plan_after` may be called before `plan` is committed."""
        if self._queues.suspects or self._left_out or not allows_planning_ahead(plan):
            return False
        # A step with drafts cannot be planned ahead, because its drafts follow sampled tokens that are not known yet.
        decoding = [entry.sequence for entry in plan if entry.samples]
        if self._draft_limits is not None and len(decoding) <= self._most_drafting:
            return False
        return len(decoding) > self._most_drafting or not any(
            self._drafter(sequence).may_draft for sequence in decoding
        )

    def expected_seconds(self, plan: Plan) -> float:
        """Return the expected seconds of the step of `plan`; 0 if unknown."""
        return self._controller.expected_seconds(sum(entry.count + len(entry.drafts) for entry in plan))

    def learn(self, plan: Plan, seconds: float) -> None:
        """Record that the step of `plan` took `seconds`."""
        by_principal: Counter[str] = Counter()
        for entry in plan:
            if not entry.decoding:
                by_principal[entry.sequence.principal] += entry.count
        prompts = by_principal.total()
        rows = sum(entry.count + len(entry.drafts) for entry in plan if entry.decoding)
        self._controller.learn(rows, by_principal, seconds)
        if rows and not prompts:
            self.gate.learn_step(rows, seconds)
        # A prefill-only step shows the prefill speed without the influence of decoding (see `Timing`).
        if not rows:
            for entry in plan:
                entry.sequence.read_tokens += entry.count
                entry.sequence.read_seconds += seconds * entry.count / prompts

    def _plan_together(self) -> Plan:
        """Return a plan of decoding sequences and prompts together, without suspects."""
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
        # Suspects wait at the head of the waiting queue and must not start together, so no prompt starts before them.
        if not self._queues.suspects:
            self._add_prompts(plan, limits)
            # The fair-share limits may allow no token, for example if only heavy principals have prompts and nothing
            # decodes. An empty plan would stop the engine although sequences wait, so this step has no limits.
            if not plan:
                self._add_prompts(plan, StepLimits())
        drafts: dict[Sequence, tuple[tuple[int, ...], Drafter | None]] = {}
        open_drafts: dict[Sequence, int] = {}
        # Drafts make a step longer. With many sequences, this costs more than accepted drafts save.
        if len(decoding) <= self._most_drafting and not self._ahead:
            remaining = self._options.max_step_tokens - sum(plan.values())
            rows = sum(plan.get(sequence, 0) for sequence in decoding)
            for sequence in decoding:
                if sequence in plan and sequence.decoding:  # a preempted and restarted sequence does not decode
                    drafts[sequence] = self._draft(sequence, remaining, rows, len(decoding))
                    rows += len(drafts[sequence][0])
                    remaining -= len(drafts[sequence][0])
            if self._draft_limits is not None and not self.gate.rests:
                undrafted = [sequence for sequence, (tokens, _) in drafts.items() if not tokens]
                open_drafts = self._open_drafts(undrafted, rows, remaining)
        entries = [self._entry(sequence, count, *drafts.get(sequence, ((), None))) for sequence, count in plan.items()]
        for entry in entries:
            entry.open_drafts = open_drafts.get(entry.sequence, 0)
            if entry.open_drafts:
                entry.drafter = entry.sequence.model_drafter
        return entries

    def _plan_suspect(self) -> Plan:
        """Return a plan with the next suspect only (see `Queues.suspects`).

        The plan is empty if no suspect gets enough pages.
        """
        plan: dict[Sequence, int] = {}
        self._image_tokens = 0
        self._room = None
        for _ in range(len(self._queues.suspects)):
            sequence = self._queues.suspects[0]
            self._queues.suspects.rotate(-1)
            if sequence.id not in self._queues.running:
                if sequence is not self._queues.waiting.first:
                    continue  # an older sequence, which was preempted, must start first
                self._queues.start(sequence, self._memory.computed_before(sequence))
            if self._place(sequence, min(sequence.pending, self._controller.max_prompt_tokens), plan):
                break
        return [self._entry(sequence, count, (), None) for sequence, count in plan.items()]

    def _add_prompts(self, plan: dict[Sequence, int], limits: StepLimits) -> None:
        """Add prompts or chunks of them to `plan`, within `limits` and the token budget."""
        width = min(len(self._queues.running) + len(self._queues.waiting), self._options.max_sequences)
        remaining = self._controller.prompt_tokens(sum(plan.values()), len(plan), width, limits)
        prompts = self._prompts(limits)
        while remaining > 0 and (sequence := next(prompts, None)):
            sequence_limit = limits.tokens_for(sequence)
            if sequence.pending > remaining and sequence_limit >= remaining:
                # Half of the tokens go to other prompts, so that a short prompt does not wait for all chunks of
                # `sequence`. `sequence` gets the other half, so that a series of short prompts never stops it.
                limits.widen(sequence, remaining // 2)
                remaining -= self._add_shortest(remaining // 2, sequence, plan, limits)
                if remaining > 0:  # an image of another prompt may have taken all tokens
                    self._place(sequence, remaining, plan)
                break
            remaining -= self._take(sequence, min(sequence.pending, sequence_limit, remaining), plan, limits)

    def _prompts(self, limits: StepLimits) -> Iterator[Sequence]:
        """Yield the sequences to prefill, those of principals with few sequences first.

        A sequence comes earlier if its principal has fewer running sequences before it. Of equal sequences, running
        ones come first. A waiting sequence moves to the running sequences when it is yielded.
        """
        # The first sequence of each principal comes first, whether it is running or waiting.
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
                    # A later, smaller sequence must not take the pages that `newcomer` waits for.
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
        """Return the waiting sequence to start next; None if none may start.

        Args:
            places: number of running sequences by principal.
        """
        candidates = (sequence for sequence in self._queues.waiting.firsts() if limits.tokens_for(sequence))
        # The principal with the fewest running sequences comes first. Equal principals keep the order of the queue.
        return min(candidates, key=lambda sequence: (places[sequence.principal], sequence.place), default=None)

    def _add_shortest(self, budget: int, chunked: Sequence, plan: dict[Sequence, int], limits: StepLimits) -> int:
        """Add up to `budget` tokens of the shortest prompts; return the number of tokens.

        The number may exceed `budget` if an image must be computed in one step. The prompt `chunked` and prompts that
        are already in `plan` get no tokens.
        """
        remaining = budget
        shortest = self._shortest(chunked, plan, limits)
        while remaining > 0 and (sequence := next(shortest, None)):
            remaining -= self._take(
                sequence, min(sequence.pending, remaining, limits.tokens_for(sequence)), plan, limits
            )
        return budget - remaining

    def _shortest(self, chunked: Sequence, plan: dict[Sequence, int], limits: StepLimits) -> Iterator[Sequence]:
        """Yield the prompts that are neither in `plan` nor `chunked`, the shortest first.

        A waiting prompt moves to the running sequences when it is yielded.
        """
        prefilling = [
            other
            for other in self._queues.running.values()
            if not other.decoding and other is not chunked and other not in plan
        ]
        first = self._queues.waiting.first
        may_start = first is not None and self._may_start(first)
        # If too few pages are free for the first prompt of the queue, no waiting prompt starts. Otherwise shorter
        # prompts could take the pages that the first prompt needs.
        missing = self._memory.missing(self._queues.waiting) if may_start else {}
        for sequence in sorted([*prefilling, *missing], key=lambda prompt: missing.get(prompt, prompt.pending)):
            if not limits.tokens_for(sequence):
                continue
            if sequence in missing and not self._start(sequence, sequence.matched):
                continue
            yield sequence

    def _start(self, sequence: Sequence, limit: int | None = None) -> bool:
        """Move a waiting sequence to the running sequences; return whether this succeeded.

        Return False if as many sequences run as allowed, or if too few KV pages are free.

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
        """Return whether the limits of sequences and pages allow `sequence` to start.

        Args:
            limit: number of leading pages to look up in the prefix cache at most; None for all full pages.
        """
        if len(self._queues.running) >= self._options.max_sequences:
            return False
        return self._memory.may_fit(sequence, self._free_room(), limit)

    def _free_room(self) -> int:
        """Return how many free pages running sequences do not need (`Memory.room`)."""
        # The number is computed once per plan and after each preemption, because `room` reads all running sequences.
        if self._room is None:
            self._room = self._memory.room(self._queues.running.values())
        return self._room

    def _take(self, sequence: Sequence, count: int, plan: dict[Sequence, int], limits: StepLimits) -> int:
        """Call `_place`, subtract the added tokens from `limits`, and return their number."""
        planned = self._place(sequence, count, plan)
        limits.take(sequence, planned)
        return planned

    def _place(self, sequence: Sequence, count: int, plan: dict[Sequence, int]) -> int:
        """Add up to `count` tokens of a sequence to `plan`, and allocate their pages.

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
            # The newest sequence is preempted, so that an older sequence never waits for a newer one.
            victim = next(reversed(self._queues.running.values()))
            plan.pop(victim, None)
            self._room = None
            self._queues.preempt(victim)
            if victim is sequence:
                return 0
        plan[sequence] = count
        return count

    def _until_image(self, sequence: Sequence, images: PromptImages, count: int) -> int:
        """Return `count`, changed so that the images in the chunk fit into the step.

        Return 0 if the sequence must wait for the next step.
        """
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

    def _draft(
        self, sequence: Sequence, budget: int, rows: int, sequences: int
    ) -> tuple[tuple[int, ...], Drafter | None]:
        """Return at most `budget` drafts for a planned sequence, and allocate their pages.

        Args:
            rows: number of rows of the `sequences` decoding sequences in the plan so far.

        Returns:
            The drafts, and the drafter that made them. The drafter is None without drafts, or if the grammar forces
            the drafts.
        """
        limit = min(budget, self._useful_drafts(sequence), MAX_DRAFTS)
        if limit <= 0:
            return (), None
        drafts, drafter = () if sequence.matcher is None else sequence.matcher.forced(limit), None
        # The text that the grammar forces is certain, unlike drafts from n-grams. Only its tokens may differ from those
        # that the model chooses.
        if not drafts:
            drafter = self._drafter(sequence)
            drafts = drafter.draft(limit)
            count, gain = self.gate.ngram_drafts(drafter.acceptance, len(drafts), rows, sequences)
            model, length = sequence.model_drafter, len(sequence.tokens)
            if model is not None and self.gate.prefers_model(model, model.missing(length), gain):
                return (), None
            drafts = drafts[:count]
            if sequence.matcher is not None:
                drafts = sequence.matcher.fitting(drafts)
        # If too few pages are free, the drafts are dropped, because they are not worth a preemption.
        if not drafts or not self._memory.grow(sequence, sequence.pending + len(drafts)):
            return (), None
        return drafts, drafter

    def _useful_drafts(self, sequence: Sequence) -> int:
        tokens_left = min(self._tokens_left(sequence), sequence.request.max_tokens - sequence.generated)
        return tokens_left - 1  # the token after the last draft is sampled, so it needs no draft

    def _open_drafts(self, sequences: list[Sequence], rows: int, budget: int) -> dict[Sequence, int]:
        """Return how many drafts the draft model adds to each sequence; allocate pages.

        Args:
            rows: number of rows of the decoding sequences in the plan.
            budget: maximum number of drafts of all sequences together.
        """
        assert self._draft_limits is not None
        candidates: dict[ModelDrafter, tuple[Sequence, Candidate]] = {}
        for sequence in sequences:
            length = len(sequence.tokens)
            # The last draft is never an input of the draft model, so it may lie beyond the draft model's context.
            limit = min(
                budget // len(sequences), self._useful_drafts(sequence), self._draft_limits.context - length + 1
            )
            if limit <= 0 or sequence.images is not None:
                continue
            if (drafter := self._model_drafter(sequence)) is not None:
                candidate = Candidate(drafter, drafter.missing(length), limit, sequence.generated)
                candidates[drafter] = sequence, candidate
        count, chosen = self.gate.choose([candidate for _, candidate in candidates.values()], rows)
        drafts: dict[Sequence, int] = {}
        for drafter in chosen:
            sequence, candidate = candidates[drafter]
            if self._memory.grow(sequence, sequence.pending + min(count, candidate.limit)):
                drafts[sequence] = min(count, candidate.limit)
        return drafts

    def _model_drafter(self, sequence: Sequence) -> ModelDrafter | None:
        """Return the drafter of a sequence; None if the draft model cannot draft for it."""
        assert self._draft_limits is not None
        drafter, length = sequence.model_drafter, len(sequence.tokens)
        if self._draft_limits.is_head:  # `HeadModel.keep` creates the drafter of a draft head
            return drafter if drafter is not None and drafter.prepare(length) else None
        drafter = sequence.model_drafter = drafter or ModelDrafter(self.gate)
        self._memory.prepare_drafts(sequence, drafter)
        return drafter if max(sequence.tokens[drafter.end :]) < self._draft_limits.vocab_size else None

    @staticmethod
    def _drafter(sequence: Sequence) -> Drafter:
        sequence.drafter = sequence.drafter or Drafter(sequence.tokens)
        return sequence.drafter

    def _ends(self, sequence: Sequence) -> bool:
        """Return whether the step in flight ends the sequence by a length limit."""
        return self._ahead and (sequence.generated >= sequence.request.max_tokens or self._tokens_left(sequence) <= 0)

    def _tokens_left(self, sequence: Sequence) -> int:
        return self._most_tokens - len(sequence.tokens)
