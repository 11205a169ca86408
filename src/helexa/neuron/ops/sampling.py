"""Sampling of tokens from logits in plain torch, with temperature, top-k, top-p and min-p.

The caller draws one uniform random number per row. The sampled token is the first token, in ascending order of token
ids, at which the cumulative probability exceeds the random number. The token therefore does not depend on other rows in
the batch, or on the order into which a sort puts equal logits.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.ops.constants import NON_FINITE

Settings = NDArray[np.float32]
"""Sampling parameters of S rows, float32 [5, S].

The five lines are temperature (0 for greedy), top-k (0 for no limit), top-p, min-p, and the uniform random number in
[0, 1).
"""

Masks = Mapping[int, NDArray[np.uint8]]
"""Bit masks of allowed tokens by row index. A mask has one bit per token id, with the lowest bit of each byte first."""

_BLOCK = 256  # tokens per block of partial sums
_CANDIDATES = 256  # largest logits sorted first; the whole vocabulary is sorted only if more tokens may remain


def choose(logits: Tensor, settings: Settings, argmax: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a sampled token for each row of logits, as int64 [S].

    A row gets `NON_FINITE` (-1) if its largest logit is NaN or infinite.

    Args:
        logits: float32 [S, vocabulary].
        settings: sampling parameters of each row.
        argmax: function that returns the greedy token of each row, with the interface of `sampling.argmax`.
    """
    largest = argmax(logits)
    drawn = np.flatnonzero(settings[0] > 0)
    if not len(drawn):
        return largest
    if len(drawn) == len(logits):
        return _draw(logits, settings).where(largest >= 0, NON_FINITE)
    chosen = largest.clone()
    chosen[drawn] = _draw(logits[drawn], settings[:, drawn])
    return chosen.where(largest >= 0, NON_FINITE)


def argmax(logits: Tensor) -> Tensor:
    """Return the token with the largest logit of each row, as int64 [S]. The lowest token id wins a tie.

    A row gets `NON_FINITE` (-1) if its largest logit is NaN or infinite.

    Args:
        logits: float32 [S, vocabulary].
    """
    largest = logits.argmax(-1, keepdim=True)
    return largest.where(logits.gather(1, largest).isfinite(), NON_FINITE).squeeze(1)


def choose_masked(logits: Tensor, masks: Masks, settings: Settings) -> list[int]:
    """Return a sampled token for each row that has a mask, among the tokens that the mask allows.

    Args:
        logits: float32 [S, vocabulary].
        masks: allowed tokens by row index.
        settings: sampling parameters, one column per row in `masks`, in the same order.
    """
    tokens: list[int] = []
    for (row, mask), of_row in zip(masks.items(), settings.T[:, :, None], strict=True):
        allowed = np.unpackbits(mask, bitorder="little", count=logits.shape[1]).view(np.bool_).nonzero()[0]
        if len(allowed) > 1:
            allowed_logits = logits[row].index_select(0, torch.from_numpy(allowed).to(logits.device)).unsqueeze(0)
            tokens.append(
                int(allowed[int(_draw(allowed_logits, of_row) if of_row[0] > 0 else allowed_logits.argmax())])
            )
        else:
            tokens.append(int(allowed[0]))
    return tokens


def _draw(logits: Tensor, settings: Settings) -> Tensor:
    """Return a sampled token for each of R rows of logits, as int64 [R]. All temperatures must be above 0."""
    temperature, top_k, top_p, min_p, uniform = settings
    probabilities = torch.softmax(logits / _column(logits, temperature), dim=-1)
    truncated = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    if len(truncated):
        rows = torch.from_numpy(truncated).to(logits.device)
        probabilities[rows] *= probabilities[rows] >= _least_kept(probabilities[rows], settings[:, truncated])
    return _inverse(probabilities, _column(logits, uniform))


def _inverse(weights: Tensor, shares: Tensor) -> Tensor:
    """Return for each row the first token at which the cumulative weight exceeds a share of the row's total, as [R].

    Cumulative sums over a whole vocabulary are slow. The search therefore first selects a block of 256 tokens, and then
    a token in the block.

    Args:
        weights: [R, vocabulary], unnormalized probabilities.
        shares: [R, 1], uniform random numbers between 0 and 1.
    """
    if weights.shape[1] <= _BLOCK:
        return _passed(weights, shares).squeeze(1)
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    masses = blocks.sum(-1)
    block = _passed(masses, shares)
    mass = masses.gather(1, block)
    share_in_block = (shares * masses.sum(-1, keepdim=True) - masses.cumsum(-1).gather(1, block) + mass) / mass
    row = _passed(blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1), share_in_block)
    # Rows with NaN logits find no token; the result must still be a valid token id.
    return (block * _BLOCK + row).clamp_(max=weights.shape[1] - 1).squeeze(1)


def _passed(weights: Tensor, shares: Tensor) -> Tensor:
    """Return for each row the first index at which the cumulative weight exceeds a share of the row's total, as [R, 1].

    Args:
        weights: [R, N].
        shares: [R, 1], between 0 and 1.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    passed = torch.searchsorted(cumulative, shares * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding must not select a token after the last weight above 0
    return torch.minimum(passed, last).clamp_(max=weights.shape[1] - 1)


def _least_kept(probabilities: Tensor, settings: Settings) -> Tensor:
    """Return for each row the smallest probability of a token that top-k, top-p and min-p keep, as [R, 1].

    The three filters are applied in this order. Tokens of equal probability are all kept or all removed.

    Args:
        probabilities: [R, vocabulary].
        settings: sampling parameters of the R rows.
    """
    vocabulary = probabilities.shape[-1]
    top_k, top_p, min_p = (_column(probabilities, column) for column in settings[1:4])
    top_k = top_k.where(top_k > 0, vocabulary)
    ordered = probabilities.topk(min(_CANDIDATES, vocabulary)).values
    enough = ((top_p < 1) & (ordered.sum(-1, keepdim=True) >= top_p)) | (ordered[:, -1:] < min_p * ordered[:, :1])
    settled = (top_k <= _CANDIDATES) | ((top_k >= vocabulary) & enough)
    if not bool(settled.all()):
        ordered = probabilities.sort(descending=True).values
    ranked = ordered * (torch.arange(ordered.shape[-1], device=ordered.device) < top_k)
    mass = ranked.cumsum(-1) / ranked.sum(-1, keepdim=True).where(top_k < vocabulary, ranked.new_tensor(1.0))
    # A token is kept if the mass before it is below top_p, so the most likely token is always kept.
    preceding_mass = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    is_kept = (ranked > 0) & ((preceding_mass < top_p) | (top_p >= 1)) & (ranked >= min_p * ranked[:, :1])
    return ranked.where(is_kept, ranked.new_tensor(torch.inf)).min(-1, keepdim=True).values


def _column(like: Tensor, values: Settings) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device).unsqueeze(1)
