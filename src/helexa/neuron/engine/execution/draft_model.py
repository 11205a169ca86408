"""Runs a draft model, a smaller model that predicts the next tokens of sequences.

The engine verifies the predicted tokens (drafts) in its next step, and accepts those that equal the sampled tokens. The
draft model samples with the seed and the position that the step will use. Its tokens therefore often equal the sampled
tokens also at temperatures above 0. Drafts never change the output.

The draft model has a KV cache of its own, with the same page numbers as the cache of the model. A page that several
sequences share is thus shared in both caches. `ModelDrafter` records which positions the draft model has computed.
"""

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import msgspec
import numpy as np

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import sampling_of
from helexa.neuron.engine.scheduling.draft_length import DraftGate, DraftLimits, ModelDrafter
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import Float32, Int32, StepInput, int32
from helexa.neuron.ops.kernel_header import NON_FINITE, PAGE_SIZE
from helexa.neuron.ops.sampling import Adjustments, Sampling

Span = tuple[Sequence, ModelDrafter, tuple[int, ...]]  # a sequence, its drafter and its drafts so far in this step


@dataclass(frozen=True)
class CacheRows:
    """The tokens of a sequence that a draft model's pass computes, and their slots."""

    tokens: list[int]
    position: int  # position of the first token
    start: int  # first position that the tokens attend to; a page begins there
    pages: list[int]  # pages of the positions from `start` on

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.position + len(self.tokens)

    @property
    def slots(self) -> list[int]:
        """The slot of each token in the KV cache."""
        positions = range(self.position, self.end)
        return [self.pages[(p - self.start) // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions]


class DraftModel:
    """A loaded draft model.

    Args:
        runner: the draft model and its KV cache.
        vocab_size: number of tokens of the model that verifies the drafts.
    """

    def __init__(self, runner: Runner, limits: DraftLimits, vocab_size: int) -> None:
        self._limits = limits
        self._runner = runner
        self._vocab_size = vocab_size

    def tail(self, plan: Plan, gate: DraftGate) -> int:
        """Return how many last tokens of each prompt need their hidden states kept.

        0 keeps no hidden states at all. Draft models need none, so only draft heads override this method.
        """
        return 0

    def keep(self, plan: Plan, states: Float32 | None, tail: int, gate: DraftGate) -> None:
        """Keep hidden states of a finished step; only draft heads override this method.

        Args:
            plan: the plan of the step, which is not committed yet.
            states: see `StepOutput.kept`.
            tail: result of the method `tail` for this plan, when the step was launched.
        """

    def add_drafts(self, plan: Plan, gate: DraftGate) -> None:
        """Compute the drafts that `plan` requests, and add them to its entries.

        An entry may get fewer drafts than it requests, for example if its grammar does not allow them.

        Args:
            gate: the draft gate, to which the duration of each pass is reported.
        """
        drafting = [entry for entry in plan if entry.open_drafts]
        self.begin([entry.drafter for entry in drafting if isinstance(entry.drafter, ModelDrafter)])
        drafts: dict[int, tuple[int, ...]] = {entry.sequence.id: () for entry in drafting}
        passes = max((entry.open_drafts for entry in drafting), default=0)
        for done in range(passes):
            spans: list[Span] = []
            for entry in drafting:
                drafter = entry.drafter
                assert isinstance(drafter, ModelDrafter)
                if entry.open_drafts > done == len(drafts[entry.sequence.id]):
                    drafter.passes = done + 1
                    spans.append((entry.sequence, drafter, drafts[entry.sequence.id]))
            if spans:
                for (sequence, _, _), token in zip(spans, self.predict(spans, gate), strict=True):
                    if token != NON_FINITE and token < self._vocab_size:
                        drafts[sequence.id] += (token,)
        for entry in drafting:
            self._finish(entry, drafts[entry.sequence.id])

    def begin(self, drafters: Rows[ModelDrafter]) -> None:
        """Prepare `drafters` for the passes of a step; overridden by draft heads."""

    def predict(self, spans: Rows[Span], gate: DraftGate) -> list[int]:
        """Return the token after the drafts of each span; `NON_FINITE` for NaN logits."""
        step = step_of([_rows(*span) for span in spans], sampling_for(spans, self._limits.vocab_size))
        begun = time.perf_counter()
        tokens = self._runner.launch(step).read().tokens
        gate.learn_pass(len(step.tokens), time.perf_counter() - begun)
        return tokens

    def finish(self, sequence: Sequence, drafter: ModelDrafter) -> None:
        """Record that the draft model has computed all known tokens of a sequence."""
        drafter.end = len(sequence.tokens)

    def _finish(self, entry: PlanEntry, drafts: tuple[int, ...]) -> None:
        sequence, drafter = entry.sequence, entry.drafter
        assert isinstance(drafter, ModelDrafter)
        self.finish(sequence, drafter)
        if sequence.matcher is not None:
            drafts = sequence.matcher.fitting(drafts)
        entry.drafts, entry.open_drafts = drafts, 0


def step_of(spans: Rows[CacheRows], sampling: Sampling) -> StepInput:
    """Return the input of a draft model's pass, which samples a draft per sequence.

    The pass computes the tokens of `spans`. The sampled drafts have the order of `spans`.
    """
    order = order_of(spans)
    ordered = [spans[index] for index in order]
    ends = np.cumsum([len(rows.tokens) for rows in ordered])
    last_rows = np.empty(len(spans), np.int32)
    last_rows[order] = ends - 1
    tables = [rows.pages[: -(-(rows.end - rows.start) // PAGE_SIZE)] for rows in ordered]
    pages = np.zeros((len(spans), max(map(len, tables))), np.int32)
    for row, table in zip(pages, tables, strict=True):
        row[: len(table)] = table
    starts = int32([0, *ends])
    return StepInput(
        tokens=int32([token for rows in ordered for token in rows.tokens]),
        positions=int32([position for rows in ordered for position in range(rows.position, rows.end)]),
        slots=int32([slot for rows in ordered for slot in rows.slots]),
        sample_rows=last_rows,
        starts=starts,
        prefixes=int32([rows.position - rows.start for rows in ordered]),
        settled=np.diff(starts),
        state_slots=np.zeros(len(spans), np.int32),
        pages=pages,
        sampling=sampling,
    )


def order_of(spans: Rows[CacheRows]) -> list[int]:
    """Return the indices of `spans` in the order of a pass: spans of one token first."""
    return sorted(range(len(spans)), key=lambda index: len(spans[index].tokens) > 1)


def sampling_for(spans: Rows[Span], vocab_size: int, logit_of: Int32 | None = None) -> Sampling:
    """Return the sampling settings of a pass that samples a draft per sequence.

    Args:
        vocab_size: number of logits per row. Penalties of tokens without a logit have no effect.
        logit_of: index of the logit of each token, `vocab_size` for a token without a logit; None if the logit of each
            token has the token's index.
    """
    sampling = sampling_of([(sequence, drafts) for sequence, _, drafts in spans])
    starts, tokens, values = msgspec.structs.astuple(sampling.adjustments)
    tokens = tokens if logit_of is None else logit_of[tokens]
    valid = tokens < vocab_size
    if not valid.all():
        starts = np.concatenate(([0], np.cumsum(valid)), dtype=np.int32)[starts]
    adjustments = Adjustments(starts, tokens[valid], values[valid])
    return msgspec.structs.replace(sampling, logprobs={}, adjustments=adjustments)


def _rows(sequence: Sequence, drafter: ModelDrafter, drafts: tuple[int, ...]) -> CacheRows:
    """Return a sequence's rows in the next pass: the latest draft, else new tokens."""
    tokens = [drafts[-1]] if drafts else sequence.tokens[drafter.end :]
    first = len(sequence.tokens) + len(drafts) - len(tokens)
    return CacheRows(tokens, first, drafter.start, sequence.pages[drafter.start // PAGE_SIZE :])
