"""Runs a draft head, which predicts tokens from hidden states of the model.

The engine verifies the drafts of a head like those of a draft model (see `draft_model`). The steps of the model compute
the hidden states anyway. The engine keeps the hidden states of each row that samples a token, and of the last tokens of
each prompt. The head therefore reads only the end of a long prompt, and delays no prompt.

The head has a small KV cache of its own. A *context* is a part of this cache with `CONTEXT` positions. Each sequence
that drafts has one context. If its context is full, or if the head has not read the last tokens of a sequence, the head
starts again from the last `TAIL` hidden states of the sequence. After a prefix hit or a preemption, the head has not
read the last tokens either, so these cases need no code of their own.
"""

import time
from collections import deque
from collections.abc import Sequence as Rows
from itertools import islice

import numpy as np

from helexa.neuron.engine.execution.draft_model import CacheRows, DraftModel, Span, order_of, sampling_for, step_of
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import may_keep, wanted_states
from helexa.neuron.engine.scheduling.draft_length import DraftGate, DraftLimits, ModelDrafter
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import Float32, Int32
from helexa.neuron.models.draft_heads import DraftHead
from helexa.neuron.ops.kernel_header import MAX_DRAFTS, NON_FINITE, PAGE_SIZE

# Number of hidden states per sequence that are kept, so that the head can start to draft.
TAIL = 32

# Maximum number of positions of a sequence that the head attends to.
CONTEXT = 16 * PAGE_SIZE


class HeadDrafter(ModelDrafter):
    """The last hidden states of a sequence, and its positions in a draft head's cache."""

    def forget(self) -> None:
        """Forget the hidden states, because the sequence is computed again."""
        super().forget()
        self._states: deque[Float32] = deque(maxlen=TAIL)  # hidden states of the last positions before `_kept`
        self._kept = 0  # the position after that of the last state in `_states`
        self.context: int | None = None  # number of the context in the cache of the head; None without a context
        # The context holds K and V of the positions from `first` to `read` - 1.
        self.first = self.read = 0

    def keep(self, position: int, states: Float32) -> None:
        """Keep hidden states of consecutive positions, the first of which is `position`."""
        # The new states begin after a gap, or before all kept states. Only consecutive positions can be kept.
        if not self._kept - len(self._states) <= position <= self._kept:
            self._states.clear()
            self._kept = position
        while self._kept > position:  # states of rejected drafts, or of tokens that were computed again
            self._states.pop()
            self._kept -= 1
        self._states.extend(states)
        self._kept += len(states)

    def prepare(self, length: int) -> bool:
        """Choose the positions that the head must compute to draft after `length` tokens.

        Returns:
            Whether the head can draft. It needs the hidden state of the token before the last of these tokens.
        """
        end, oldest = length - 1, self._kept - len(self._states)
        if not oldest < end <= self._kept:
            return False
        full = end + MAX_DRAFTS - self.first > CONTEXT
        if self.context is None or full or self.read < max(oldest, end - TAIL) or self.read >= end:
            self.first = self.read = max(oldest, end - TAIL)
        return True

    def missing(self, length: int) -> int:
        """Return how many positions the head must compute to draft after `length` tokens."""
        return length - 1 - self.read

    def learn(self, drafted: int, accepted: int) -> None:
        """Record how many of the drafts in a step were accepted."""
        super().learn(drafted, accepted)
        # `end` counts positions in the pages of the sequence, but a head writes only to its own context.
        self.end = 0

    def unread(self, length: int) -> list[Float32]:
        """Return the hidden states of the positions that `prepare` has chosen to compute."""
        oldest = self._kept - len(self._states)
        return list(islice(self._states, self.read - oldest, length - 1 - oldest))


class HeadModel(DraftModel):
    """A loaded draft head.

    Args:
        runner: the draft head and its KV cache.
        vocab_size: number of tokens of the model that verifies the drafts.
    """

    def __init__(self, runner: Runner, limits: DraftLimits, vocab_size: int) -> None:
        contexts = runner.pages // (CONTEXT // PAGE_SIZE)  # number of sequences with a part of the KV cache
        super().__init__(runner, limits, vocab_size)
        assert isinstance(runner.model, DraftHead)
        self._head = runner.model
        self._owners: list[HeadDrafter | None] = [None] * contexts  # the drafter that has each context
        self._numbers = list(range(contexts))  # numbers of the contexts, the least recently used first
        self._own_states: dict[int, Float32] = {}  # hidden state that the last pass computed, by sequence id
        # A head may have logits of fewer tokens than the model. `targets` then maps each logit to a token of the model,
        # and `_logit_of` maps each token to its logit, or to the number of logits if the token has no logit.
        self._targets, self._logits = self._head.targets, vocab_size
        self._logit_of: Int32 | None = None
        if self._targets is not None:
            self._logits = len(self._targets)
            self._logit_of = np.full(vocab_size, self._logits, np.int32)
            self._logit_of[self._targets] = np.arange(self._logits)

    def tail(self, plan: Plan, gate: DraftGate) -> int:
        """Return how many last prompt tokens need kept states: `TAIL`, or 0 for no drafts."""
        return TAIL if len(plan) <= len(self._owners) and not gate.rests else 0

    def keep(self, plan: Plan, states: Float32 | None, tail: int, gate: DraftGate) -> None:
        """Keep the hidden states of a finished step (see `DraftModel.keep`)."""
        if states is None:
            return
        sampled, row = 0, sum(len(entry.drafts) + 1 for entry in plan if entry.samples)
        for entry in plan:
            sequence, wanted = entry.sequence, wanted_states(entry, tail)
            kept = may_keep(sequence) and bool(sequence.pages)  # False if the sequence ended after the plan
            if kept and not isinstance(sequence.model_drafter, HeadDrafter):
                sequence.model_drafter = HeadDrafter(gate)
            drafter = sequence.model_drafter
            if wanted:
                if kept and isinstance(drafter, HeadDrafter):
                    drafter.keep(wanted.start, states[row : row + len(wanted)])
                row += len(wanted)
            if entry.samples:
                count = len(entry.drafts) + 1
                if kept and isinstance(drafter, HeadDrafter):
                    drafter.keep(sequence.computed + entry.count - 1, states[sampled : sampled + count])
                sampled += count

    def begin(self, drafters: Rows[ModelDrafter]) -> None:
        """Give each drafter without a context the least recently used context."""
        own = [drafter for drafter in drafters if isinstance(drafter, HeadDrafter)]
        kept = {drafter.context for drafter in own if self._owns(drafter)}
        for drafter in own:
            number = drafter.context
            if number is None or not self._owns(drafter):
                number = next(number for number in self._numbers if number not in kept)
                kept.add(number)
                self._take(drafter, number)
            self._numbers.remove(number)
            self._numbers.append(number)

    def _owns(self, drafter: HeadDrafter) -> bool:
        return drafter.context is not None and self._owners[drafter.context] is drafter

    def _take(self, drafter: HeadDrafter, number: int) -> None:
        previous = self._owners[number]
        if previous is not None and previous.context == number:
            previous.context = None
        self._owners[number], drafter.context = drafter, number

    def predict(self, spans: Rows[Span], gate: DraftGate) -> list[int]:
        """Return the token after the drafts of each span; `NON_FINITE` for NaN logits."""
        rows = [self._rows(*span) for span in spans]
        step = step_of(rows, sampling_for(spans, self._logits, self._logit_of))
        begun = time.perf_counter()
        states = [self._states(*spans[index]) for index in order_of(rows)]
        self._head.set_inputs(np.concatenate(states))
        output = self._runner.launch(step, keep=True).read()
        assert output.kept is not None
        for (sequence, drafter, _), token, state in zip(spans, output.tokens, output.kept, strict=True):
            self._own_states[sequence.id] = state[None]
            if token == NON_FINITE:
                self._clear(drafter)
        gate.learn_pass(len(step.tokens), time.perf_counter() - begun)
        if self._targets is None:
            return output.tokens
        return [token if token == NON_FINITE else int(self._targets[token]) for token in output.tokens]

    def finish(self, sequence: Sequence, drafter: ModelDrafter) -> None:
        """Record that the head has computed all known tokens of a sequence."""
        assert isinstance(drafter, HeadDrafter)
        drafter.read = len(sequence.tokens) - 1
        self._own_states.pop(sequence.id, None)

    def _rows(self, sequence: Sequence, drafter: ModelDrafter, drafts: tuple[int, ...]) -> CacheRows:
        assert isinstance(drafter, HeadDrafter)
        first = len(sequence.tokens) + len(drafts) - 2 if drafts else drafter.read
        # Each row combines the hidden state of a position with the token at the next position.
        tokens = [drafts[-1]] if drafts else sequence.tokens[drafter.read + 1 :]
        return CacheRows(tokens, first - drafter.first, 0, self._pages(drafter))

    def _states(self, sequence: Sequence, drafter: ModelDrafter, drafts: tuple[int, ...]) -> Float32:
        assert isinstance(drafter, HeadDrafter)
        return self._own_states[sequence.id] if drafts else np.stack(drafter.unread(len(sequence.tokens)))

    @staticmethod
    def _pages(drafter: HeadDrafter) -> list[int]:
        assert drafter.context is not None
        pages = CONTEXT // PAGE_SIZE
        return list(range(drafter.context * pages, (drafter.context + 1) * pages))

    def _clear(self, drafter: ModelDrafter) -> None:
        """Set the KV pages of a drafter's context to zero."""
        # NaN would affect the next sequence in these pages even at masked positions.
        assert isinstance(drafter, HeadDrafter)
        self._runner.clear(self._pages(drafter))
