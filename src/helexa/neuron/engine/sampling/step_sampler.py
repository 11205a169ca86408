"""The sampler: chooses one token for each row of logits, with separate settings per row.

The steps for each row are: logit bias, penalties, temperature, top-k, top-p, min-p, random draw (see `ops.sampling` for
the last five). The random number of a draw depends only on the row's seed and position. The sampled tokens are
therefore independent of other sequences in the batch and of preemptions.

If a grammar rejects a row's token, a second draw with another random number chooses among the allowed tokens. Without
top-k, top-p and min-p, the result has the model's distribution over the allowed tokens (rejection sampling). With these
filters, the distribution may differ from one in which the filters are applied only to the allowed tokens. The reason is
that the first draw can choose a token that passes the filters in the whole vocabulary, but would not pass them among
the allowed tokens.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.engine.sampling.grammar_matcher import Mask
from helexa.neuron.engine.step.readback import Readback
from helexa.neuron.engine.step.step_input import Adjustments, Sampling
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.sampling import Settings
from helexa.neuron.ops.upload import upload

RejectionMasks = Callable[[list[int]], dict[int, Mask]]
"""Type of functions that receive one token per row, and return a mask of the allowed tokens for each rejected token."""

_MASK64 = (1 << 64) - 1


class Sampled:
    """The tokens that the device samples in one step. The device may still be computing them.

    Attributes:
        tokens: int64 [S], one token for each of S rows, on the device; `NON_FINITE` if the row's largest logit is NaN
            or infinite.
    """

    def __init__(self, ops: Ops, logits: Tensor, sampling: Sampling, tokens: Tensor) -> None:
        self.tokens = tokens
        self._ops = ops
        self._logits = logits
        self._sampling = sampling
        self._copy = Readback(tokens)

    def read(self, rejection_masks: RejectionMasks | None = None) -> list[int]:
        """Wait for the tokens and return them. Tokens that a grammar rejects are replaced by a second draw.

        Args:
            rejection_masks: function that returns masks of the allowed tokens for rows whose token a grammar rejects.
                None accepts all tokens. The second draw needs the logits, so they must be unchanged since `launch`.
        """
        tokens: list[int] = self._copy.wait().tolist()
        masks = rejection_masks(tokens) if rejection_masks is not None else {}
        if masks:
            settings = _settings(self._sampling, again=True)[:, list(masks)]
            for row, token in zip(masks, self._ops.choose_masked(self._logits, masks, settings), strict=True):
                tokens[row] = token
        return tokens


def launch(ops: Ops, logits: Tensor, sampling: Sampling, last: Tensor | None = None) -> Sampled:
    """Launch the sampling of one token for each row of logits, without waiting for the device.

    Args:
        logits: [S, vocabulary], of any float dtype. The function may change them in place. They are kept for the second
            draw of rejected tokens.
        last: int64 [N], the tokens that the previous step has sampled; None if no adjustment in `sampling` refers to
            them.
    """
    logits = _adjust(logits, sampling, last)
    return Sampled(ops, logits, sampling, ops.choose(logits, _settings(sampling)))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64], again: bool = False) -> NDArray[np.float64]:
    """Return one random number in [0, 1) for each pair of seed and position.

    The generator is counter-based (SplitMix64; Steele, Lea and Flood, 2014).

    Args:
        seeds: seed of each number.
        positions: position of each number.
        again: whether to return the numbers of a second, independent series. They are used for the second draw after a
            grammar has rejected a token.
    """
    state = seeds * np.uint64(0xD1342543DE82EF95) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64((0x632BE59BD9B4E019 + again * 0xD6E8FEB86659FD93) & _MASK64)
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)


def _settings(sampling: Sampling, again: bool = False) -> Settings:
    settings = np.zeros((5, len(sampling.seeds)), np.float32)
    drawn = sampling.temperature > 0
    if drawn.any():
        rows = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        settings[:] = *rows, uniforms(sampling.seeds, sampling.positions, again)
        settings[:, ~drawn] = 0
    return settings


def _adjust(logits: Tensor, sampling: Sampling, last: Tensor | None) -> Tensor:
    """Apply logit biases and penalties to the rows that request them, and return the logits.

    If any are applied, the result is float32, otherwise it is `logits` unchanged.
    """
    bias, repetition, presence = sampling.bias, sampling.repetition, sampling.presence
    if not (len(bias.rows) or len(repetition.rows) or len(presence.rows)):
        return logits
    logits = logits.float().contiguous()
    if len(bias.rows):
        indices, values = _cells(bias, logits, last)
        logits.view(-1)[indices] += values
    if len(repetition.rows):
        indices, values = _cells(repetition, logits, last)
        selected = logits.view(-1)[indices]
        logits.view(-1)[indices] = torch.where(selected > 0, selected / values, selected * values)
    if len(presence.rows):
        indices, values = _cells(presence, logits, last)
        logits.view(-1)[indices] -= values
    return logits


def _cells(adjustments: Adjustments, logits: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return which logits are adjusted, as indices into the flattened `logits`, and the operand of each adjustment."""
    tokens = upload(adjustments.tokens.astype(np.int64), logits.device)
    if last is not None and (adjustments.tokens < 0).any():
        last_tokens = last[tokens.clamp(max=-1)].clamp(min=0)  # `NON_FINITE` must not index the previous row
        tokens = torch.where(tokens < 0, last_tokens, tokens)
    starts = upload(adjustments.rows.astype(np.int64) * logits.shape[1], logits.device)
    return starts + tokens, upload(adjustments.values, logits.device)
