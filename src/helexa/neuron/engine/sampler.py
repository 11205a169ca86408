"""The sampler: logits of several rows to one token each, every row with settings of its own.

Order per row: logit bias, penalties, temperature, top-k, top-p, min-p, draw. A draw is the inverse of the cumulative
distribution at one uniform number that depends on the row's seed and position alone, so neither the batch nor a
preemption changes what a seed yields.

A token that a row's grammar refuses is chosen again, with another such number, from what the grammar leaves. So without
top-k and the like every draw is one from the distribution over that (rejection sampling); with them, a token that they
keep of the whole vocabulary is not lost to those that they would keep of what the grammar leaves.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.engine.guide import Mask
from helexa.neuron.engine.masks import allowed
from helexa.neuron.engine.messages import SamplingParams
from helexa.neuron.engine.plan import UNSOUND, Plan
from helexa.neuron.engine.sequence import Sequence

Refused = Callable[[list[int]], dict[int, Mask]]
"""Takes a token for each row; returns, by row, what may be chosen instead of those that may not."""

_BLOCK = 256  # of tokens whose weights are summed up first
_CANDIDATES = 256  # sorted first; the whole vocabulary is sorted only when a nucleus reaches beyond them
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


def sample(
    logits: Tensor,
    rows: Rows[Row],
    argmax: Callable[[Tensor], Tensor] | None = None,
    refused: Refused | None = None,
) -> list[int]:
    """Choose a token for each row.

    Args:
        logits: [S, vocabulary], any float dtype; may be changed.
        rows: what the S rows are for.
        argmax: float32 [S, vocabulary] -> [S], the first of the largest in each row; torch's if None.
        refused: which tokens may not be chosen; none if None.

    Returns:
        The tokens; `UNSOUND` where the largest logit is no finite number, as it is in a row computed from such.
    """
    logits = _adjust(logits.float(), rows)
    params = [row.params for row in rows]
    chosen = logits.argmax(-1) if argmax is None else argmax(logits)
    sound = logits.gather(1, chosen.unsqueeze(1)).squeeze(1).isfinite()
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawn:
        own = logits if len(drawn) == len(rows) else logits[drawn]
        uniforms = [uniform(params[row].seed, rows[row].position) for row in drawn]
        chosen[drawn] = _draw(own, [params[row] for row in drawn], uniforms)
    tokens = chosen.where(sound, UNSOUND).tolist()
    for row, mask in (refused(tokens) if refused is not None else {}).items():
        tokens[row] = _choose_of(allowed(mask, logits.shape[1]), logits[row], rows[row])
    return tokens


def _choose_of(tokens: NDArray[np.int64], logits: Tensor, row: Row) -> int:
    """One of some tokens, again, from the logits [vocabulary] of a row."""
    if len(tokens) == 1:
        return int(tokens[0])
    left = logits.index_select(0, torch.from_numpy(tokens).to(logits.device)).unsqueeze(0)
    p = row.params
    if p.temperature > 0:
        return int(tokens[int(_draw(left, [p], [uniform(p.seed, row.position, again=True)]))])
    return int(tokens[int(left.argmax())])


def uniform(seed: int, position: int, again: bool = False) -> float:
    """A number in [0, 1), and another one `again`, by a counter (SplitMix64; Steele, Lea and Flood, 2014)."""
    state = seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019
    state = (state + again * 0xD6E8FEB86659FD93) & _MASK64
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        state = ((state ^ (state >> shift)) * multiplier) & _MASK64
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def _adjust(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """Bias and penalties, only on rows that ask for them."""
    for row, (sequence, drafts, p) in enumerate((row.sequence, row.drafts, row.params) for row in rows):
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=logits.device)
            logits[row, ids] += torch.tensor(list(p.logit_bias.values()), device=logits.device)
        if p.repetition_penalty != 1.0:
            ids = torch.tensor(sorted({*sequence.tokens, *drafts}), device=logits.device)
            seen = logits[row, ids]
            logits[row, ids] = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        if (p.frequency_penalty or p.presence_penalty) and (said := [*sequence.said, *drafts]):
            counts = Counter(said)
            ids = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
            logits[row, ids] -= p.presence_penalty + p.frequency_penalty * times
    return logits


def _draw(logits: Tensor, params: Rows[SamplingParams], uniforms: list[float]) -> Tensor:
    """One token per row, [R], from rows of logits that all have a temperature above 0."""
    probabilities = torch.softmax(logits / _column(logits, [p.temperature for p in params]), dim=-1)
    truncated = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if truncated:
        rows = torch.tensor(truncated, device=logits.device)
        least = _least_kept(probabilities[rows], [params[row] for row in truncated])
        probabilities[rows] *= probabilities[rows] >= least
    return _inverse(probabilities, _column(logits, uniforms))


def _inverse(weights: Tensor, shares: Tensor) -> Tensor:
    """By row, the first token at which the cumulative weight [R, vocabulary] passes a share [R, 1] of the whole: [R].

    In order of token ids, so that neither ties nor the company of other rows change what a draw yields; first among
    blocks and then within one, as running sums of a whole vocabulary are slow.
    """
    if weights.shape[1] <= _BLOCK:
        return _passed(weights, shares).squeeze(1)
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    masses = blocks.sum(-1)
    block = _passed(masses, shares)
    mass = masses.gather(1, block)
    rest = (shares * masses.sum(-1, keepdim=True) - masses.cumsum(-1).gather(1, block) + mass) / mass
    place = _passed(blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1), rest)
    # Logits that are not numbers find no token at all; whatever is chosen then must be one that the model has.
    return (block * _BLOCK + place).clamp_(max=weights.shape[1] - 1).squeeze(1)


def _passed(weights: Tensor, shares: Tensor) -> Tensor:
    """Where running sums of weights [R, N] pass shares [R, 1] of the whole: [R, 1]."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, shares * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding must not step past the last token of any weight
    return torch.minimum(found, last).clamp_(max=weights.shape[1] - 1)


def _least_kept(probabilities: Tensor, params: Rows[SamplingParams]) -> Tensor:
    """The smallest probability, [R, 1], that top-k, then top-p, then min-p leave in each row; ties stay together."""
    vocabulary = probabilities.shape[-1]
    top_k = _column(probabilities, [p.top_k if p.top_k > 0 else vocabulary for p in params])
    top_p = _column(probabilities, [p.top_p for p in params])
    min_p = _column(probabilities, [p.min_p for p in params])
    ordered = probabilities.topk(min(_CANDIDATES, vocabulary)).values
    enough = ((top_p < 1) & (ordered.sum(-1, keepdim=True) >= top_p)) | (ordered[:, -1:] < min_p * ordered[:, :1])
    settled = (top_k <= _CANDIDATES) | ((top_k >= vocabulary) & enough)
    if not bool(settled.all()):
        ordered = probabilities.sort(descending=True).values
    ranked = ordered * (torch.arange(ordered.shape[-1], device=ordered.device) < top_k)
    mass = ranked.cumsum(-1) / ranked.sum(-1, keepdim=True).where(top_k < vocabulary, ranked.new_tensor(1.0))
    # A token stays while the mass before it is below top_p, so the most likely one always does.
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept = (ranked > 0) & ((before < top_p) | (top_p >= 1)) & (ranked >= min_p * ranked[:, :1])
    return ranked.where(kept, ranked.new_tensor(torch.inf)).min(-1, keepdim=True).values


def _column(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype).unsqueeze(1)
