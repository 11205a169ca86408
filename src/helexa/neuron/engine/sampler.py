"""The sampler: logits of several rows to one token each, every row with settings of its own.

Order per row: logit bias, penalties, temperature, top-k, top-p, min-p, draw (see `ops.sampling` for the last five). The
number that a draw takes depends on the row's seed and position alone, so neither the batch nor a preemption changes
what a seed yields.

A token that a row's grammar refuses is chosen again, with another such number, from what the grammar leaves. So without
top-k and the like every draw is one from the distribution over that (rejection sampling); with them, a token that they
keep of the whole vocabulary is not lost to those that they would keep of what the grammar leaves.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.engine.guide import Mask
from helexa.neuron.engine.messages import SamplingParams
from helexa.neuron.engine.plan import Plan
from helexa.neuron.engine.readback import Readback
from helexa.neuron.engine.sequence import Sequence
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.sampling import Settings
from helexa.neuron.ops.upload import upload

Refused = Callable[[list[int]], dict[int, Mask]]
"""Takes a token for each row; returns, by row, what may be chosen instead of those that may not."""

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Row:
    """Whose next token a row of logits is for: that of `sequence` if `drafts` came after its tokens."""

    sequence: Sequence
    drafts: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        """The settings of its sequence."""
        return self.sequence.request.sampling

    @property
    def position(self) -> int:
        """Where the token that it is for will be."""
        return len(self.sequence.tokens) + len(self.drafts)


def rows_of(plan: Plan) -> list[Row]:
    """The rows of logits of a plan: of each entry that samples one, and one more per draft."""
    return [
        Row(entry.sequence, entry.drafts[:count])
        for entry in plan
        if entry.samples
        for count in range(len(entry.drafts) + 1)
    ]


class Sampled:
    """Tokens that are chosen on the device, whether or not it has come to that yet.

    Attributes:
        tokens: int64 [S] on the device; `NON_FINITE` where the largest logit is no finite number.
    """

    def __init__(self, ops: Ops, logits: Tensor, rows: Rows[Row], tokens: Tensor) -> None:
        self.tokens = tokens
        self._ops = ops
        self._logits = logits
        self._rows = rows
        self._copy = Readback(tokens)

    def read(self, refused: Refused | None = None) -> list[int]:
        """The tokens, as soon as they are there.

        Args:
            refused: which of them may not be chosen; none if None. Where there are such, the logits must still be what
                they were.
        """
        tokens: list[int] = self._copy.wait().tolist()
        masks = refused(tokens) if refused is not None else {}
        if masks:
            settings = _settings([self._rows[place] for place in masks], again=True)
            for place, token in zip(masks, self._ops.choose_of(self._logits, masks, settings), strict=True):
                tokens[place] = token
        return tokens


def launch(ops: Ops, logits: Tensor, rows: Rows[Row], last: Tensor | None = None) -> Sampled:
    """Choose a token for each row, without waiting for the device.

    Args:
        logits: [S, vocabulary], any float dtype; may be changed, and is kept for what a grammar refuses.
        rows: what the S rows are for.
        last: int64 [N], the tokens of the step before, if sequences stand `as_after` it.
    """
    logits = _adjust(logits, rows, last)
    return Sampled(ops, logits, rows, ops.choose(logits, _settings(rows)))


def uniforms(seeds: Rows[int], positions: Rows[int], again: bool = False) -> NDArray[np.float64]:
    """Numbers in [0, 1), and others `again`, by a counter (SplitMix64; Steele, Lea and Flood, 2014)."""
    state = np.array([seed & _MASK64 for seed in seeds], np.uint64) * np.uint64(0xD1342543DE82EF95)
    state += np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64((0x632BE59BD9B4E019 + again * 0xD6E8FEB86659FD93) & _MASK64)
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)


def _settings(rows: Rows[Row], again: bool = False) -> Settings:
    settings = np.zeros((5, len(rows)), np.float32)
    drawn = [place for place, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        params = [rows[place].params for place in drawn]
        settings[:4, drawn] = np.array([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params]).T
        settings[4, drawn] = uniforms([p.seed for p in params], [rows[place].position for place in drawn], again)
    return settings


class _Cells:
    """Cells of logits, counted through all rows, and a number for each."""

    def __init__(self) -> None:
        self._places: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, start: int, tokens: NDArray[np.int64], values: NDArray[np.floating] | float) -> None:
        """Tokens of the row that begins at `start`, each once."""
        self._places.append(start + tokens)
        self._values.append(np.broadcast_to(values, tokens.shape).astype(np.float32))

    def __bool__(self) -> bool:
        return bool(self._places)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cells and numbers there."""
        return upload(np.concatenate(self._places), device), upload(np.concatenate(self._values), device)


def _adjust(logits: Tensor, rows: Rows[Row], last: Tensor | None) -> Tensor:
    """Bias and penalties, only on rows that ask for them; float32 if there is any."""
    bias, repeated, said = _Cells(), _Cells(), _Cells()
    coming: list[tuple[int, int, float]] = []  # where a row starts, the place in `last` of its last token, its penalty
    for place, row in enumerate(rows):
        p, start = row.params, place * logits.shape[1]
        if p.logit_bias:
            bias.add(start, np.array(list(p.logit_bias)), np.array(list(p.logit_bias.values())))
        if p.repetition_penalty != 1.0:
            repeated.add(start, row.sequence.distinct.array(), p.repetition_penalty)
            if row.drafts:
                repeated.add(start, np.array(row.drafts), p.repetition_penalty)
            if (place_in_last := row.sequence.tokens[-1]) < 0:
                coming.append((start, place_in_last, p.repetition_penalty))
        if (p.frequency_penalty or p.presence_penalty) and (output := [*row.sequence.said, *row.drafts]):
            tokens, times = np.unique(output, return_counts=True)
            said.add(start, tokens, p.presence_penalty + p.frequency_penalty * times)
    if not (bias or repeated or said):
        return logits
    logits = logits.float().contiguous()
    flat = logits.view(-1)
    if bias:
        cells, values = bias.on(logits.device)
        flat[cells] += values
    if repeated:
        cells, values = repeated.on(logits.device)
        if coming and last is not None:
            starts, places, penalties = (np.array(column) for column in zip(*coming, strict=True))
            tokens = last[upload(places, logits.device)].clamp(min=0)  # `NON_FINITE` must not reach the row before
            cells = torch.cat((cells, upload(starts, logits.device) + tokens))
            values = torch.cat((values, upload(penalties.astype(np.float32), logits.device)))
        flat[cells] = torch.where(flat[cells] > 0, flat[cells] / values, flat[cells] * values)
    if said:
        cells, values = said.on(logits.device)
        flat[cells] -= values
    return logits
