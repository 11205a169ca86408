"""Runs a draft model, a smaller model that predicts the next tokens of sequences.

The engine verifies the predicted tokens (drafts) in its next step, and accepts those that equal the sampled tokens. The
draft model samples with the seed and the position that the step will use. Its tokens therefore often equal the sampled
tokens also at temperatures above 0. Drafts never change the output.

The draft model has a KV cache of its own, with the same page numbers as the cache of the model. A page that several
sequences share is thus shared in both caches. `ModelDrafter` records which positions the draft model has computed.
"""

import time
from collections.abc import Sequence as Rows

import msgspec
import numpy as np

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder import sampling_of
from helexa.neuron.engine.scheduling.draft_gate import DraftGate, DraftLimits, ModelDrafter
from helexa.neuron.engine.scheduling.sequence import Plan, PlanEntry, Sequence
from helexa.neuron.engine.step.step_input import StepInput, int32
from helexa.neuron.ops.constants import NON_FINITE, PAGE_SIZE
from helexa.neuron.ops.sampling import Adjustments, Sampling

_Span = tuple[Sequence, ModelDrafter, tuple[int, ...]]  # the drafts so far of a sequence


class DraftModel:
    """A loaded draft model.

    Args:
        runner: the draft model and its KV cache.
        limits: its limits for the planner.
        vocab_size: number of tokens of the model that verifies the drafts.
    """

    def __init__(self, runner: Runner, limits: DraftLimits, vocab_size: int) -> None:
        self._limits = limits
        self._runner = runner
        self._vocab_size = vocab_size

    def add_drafts(self, plan: Plan, gate: DraftGate) -> None:
        """Add the drafts that `plan` asks for to its entries.

        Args:
            gate: the gate, which learns the duration of each pass.
        """
        drafting = [entry for entry in plan if entry.open_drafts]
        drafts: dict[int, tuple[int, ...]] = {entry.sequence.id: () for entry in drafting}
        passes = max((entry.open_drafts for entry in drafting), default=0)
        for done in range(passes):
            spans: list[_Span] = []
            for entry in drafting:
                drafter = entry.drafter
                assert isinstance(drafter, ModelDrafter)
                if entry.open_drafts > done == len(drafts[entry.sequence.id]):
                    drafter.passes = done + 1
                    spans.append((entry.sequence, drafter, drafts[entry.sequence.id]))
            if spans:
                for (sequence, _, _), token in zip(spans, self._predict(spans, gate), strict=True):
                    if token != NON_FINITE and token < self._vocab_size:
                        drafts[sequence.id] += (token,)
        for entry in drafting:
            self._finish(entry, drafts[entry.sequence.id])

    def _predict(self, spans: Rows[_Span], gate: DraftGate) -> list[int]:
        """Return the next token of each sequence after its drafts so far."""
        step = _step(spans, self._limits.vocab_size)
        begun = time.perf_counter()
        tokens = self._runner.launch(step).read().tokens
        gate.learn_pass(len(step.tokens), time.perf_counter() - begun)
        return tokens

    def _finish(self, entry: PlanEntry, drafts: tuple[int, ...]) -> None:
        sequence, drafter = entry.sequence, entry.drafter
        assert isinstance(drafter, ModelDrafter)
        drafter.end = len(sequence.tokens)
        if sequence.matcher is not None:
            drafts = sequence.matcher.fitting(drafts)
        entry.drafts, entry.open_drafts = drafts, 0


def _step(spans: Rows[_Span], vocab_size: int) -> StepInput:
    """Return the input of the pass that yields the next draft of each sequence.

    The pass computes the tokens that are missing. The sampled tokens have the order of `spans`.

    Args:
        vocab_size: number of logits per row. Penalties of other tokens have no effect.
    """
    inputs = [_inputs(*span) for span in spans]
    order = sorted(range(len(spans)), key=lambda index: len(inputs[index]) > 1)  # spans of one row come first
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    last_rows = [0] * len(spans)
    tables: list[list[int]] = []
    prefixes: list[int] = []
    for index in order:
        sequence, drafter, drafts = spans[index]
        end = len(sequence.tokens) + len(drafts)
        begin = end - len(inputs[index])
        tokens += inputs[index]
        positions += range(begin, end)
        slots += [sequence.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(begin, end)]
        ends.append(len(tokens))
        last_rows[index] = len(tokens) - 1
        prefixes.append(begin - drafter.start)
        tables.append(sequence.pages[drafter.start // PAGE_SIZE : -(-end // PAGE_SIZE)])
    pages = np.zeros((len(spans), max(map(len, tables))), np.int32)
    for row, table in zip(pages, tables, strict=True):
        row[: len(table)] = table
    starts = int32([0, *ends])
    return StepInput(
        tokens=int32(tokens),
        positions=int32(positions),
        slots=int32(slots),
        sample_rows=int32(last_rows),
        starts=starts,
        prefixes=int32(prefixes),
        settled=np.diff(starts),
        state_slots=np.zeros(len(spans), np.int32),
        pages=pages,
        sampling=_sampling(spans, vocab_size),
    )


def _sampling(spans: Rows[_Span], vocab_size: int) -> Sampling:
    sampling = sampling_of([(sequence, drafts) for sequence, _, drafts in spans])
    starts, tokens, values = msgspec.structs.astuple(sampling.adjustments)
    valid = tokens < vocab_size
    if not valid.all():
        starts = np.concatenate(([0], np.cumsum(valid)), dtype=np.int32)[starts]
    adjustments = Adjustments(starts, tokens[valid], values[valid])
    return msgspec.structs.replace(sampling, logprobs={}, adjustments=adjustments)


def _inputs(sequence: Sequence, drafter: ModelDrafter, drafts: tuple[int, ...]) -> list[int]:
    """Return the tokens for the next pass: the missing tokens, or the latest draft."""
    return [drafts[-1]] if drafts else sequence.tokens[drafter.end :]
