"""Sampling of tokens with temperature, top-k, top-p and min-p, in plain torch.

The native kernel `sampling.c` and the Triton kernel `triton/sampling.py` sample the same tokens. The caller draws one
uniform random number per row. The sampled token is the first token, in ascending order of token ids, at which the
cumulative probability exceeds the random number. The token therefore does not depend on other rows in the batch, or on
the order into which a sort puts equal logits.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.ops.kernel_header import NON_FINITE
from helexa.neuron.tensors import Device, Tensor

# Bit masks of allowed tokens by row index. A mask has one bit per token id, with the lowest bit of each byte first.
# Each mask must allow a token, and all masks must have the same length.
Masks: TypeAlias = Mapping[int, NDArray[np.uint8]]

ADJUSTMENT_KINDS = 3  # Number of kinds of adjustments: biases, repetition penalties and presence penalties

_MASK64 = (1 << 64) - 1

# Sampling parameters of S rows, float32 [5, S]. The five lines are temperature (0 for greedy), top-k (0 for no limit),
# top-p, min-p, and the uniform random number in [0, 1).
Settings = NDArray[np.float32]

_BLOCK = 256  # tokens per block of partial sums
# Number of most probable tokens that are sorted first. The whole vocabulary is sorted only if the filters may keep
# more.
_CANDIDATES = 256


class Adjustments(msgspec.Struct, frozen=True):
    """Logit biases and penalties: N changes of single logits before sampling.

    The adjustments are of three kinds, and applied in this order: biases are added to logits. Repetition penalties
    divide positive logits, and multiply other logits. Presence penalties, which include frequency penalties, are
    subtracted. A row may have several repetition penalties for the same token, which count once.
    """

    # int32 [3 * S + 1], for S rows. The adjustments of kind k of row r have the indexes from `starts[k * S + r]` to
    # `starts[k * S + r + 1]` (exclusive). Empty if N is 0.
    starts: NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    # int32 [N], the token id of each adjusted logit. A negative number is a placeholder for a token that is not known
    # yet. The placeholder is an index into the tokens that the previous step samples; -1 is the last of these tokens.
    tokens: NDArray[np.int32] = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    # float32 [N], the operand of each adjustment, for example the number to add
    values: NDArray[np.float32] = msgspec.field(default_factory=lambda: np.empty(0, np.float32))


class Sampling(msgspec.Struct, frozen=True):
    """Sampling settings for S rows of logits."""

    # float32 [S, 4], the temperature (0 for greedy), top-k (0 for no limit), top-p and min-p of each row
    filters: NDArray[np.float32]
    seeds: NDArray[np.uint64]  # uint64 [S], seed of each row
    # int64 [S], position of the token to sample. Seed and position determine the random number of a row.
    positions: NDArray[np.int64]
    # Number of likeliest tokens to report with the log-probability of the sampled token, by row. Rows that request no
    # log-probabilities have no entry.
    logprobs: dict[int, int] = {}
    adjustments: Adjustments = Adjustments()  # logit biases and penalties


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64], again: bool = False) -> NDArray[np.float64]:
    """Return one random number in [0, 1) for each pair of seed and position.

    The generator is counter-based (SplitMix64; Steele, Lea and Flood, 2014).

    Args:
        again: whether to return the numbers of a second, independent series, for the draw after a grammar has rejected
            a token.
    """
    # The native kernel `sampling.c` computes the same numbers. A change here needs the same change there.
    state = seeds * np.uint64(0xD1342543DE82EF95) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64((0x632BE59BD9B4E019 + again * 0xD6E8FEB86659FD93) & _MASK64)
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)


def upload(array: NDArray[Any], device: Device) -> Tensor:
    """Return a copy of a host array on the device, without waiting for the device."""
    # The copy uses pinned memory, because a copy from pageable memory would wait for all work queued on the GPU.
    tensor = tensors.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def settings_of(sampling: Sampling, again: bool = False) -> Settings:
    """Return the parameters of `sampling` with a random number for each row.

    All parameters of a greedy row are 0. `again` is as for `uniforms`.
    """
    settings = np.zeros((5, len(sampling.seeds)), np.float32)
    drawn = sampling.filters[:, 0] > 0
    if drawn.any():
        numbers = uniforms(sampling.seeds, sampling.positions, again)
        # Rounding to float32 may yield 1, which would select the last token, even an unlikely one. The limit is
        # therefore the largest float32 number below 1.
        settings[:4], settings[4] = sampling.filters.T, np.minimum(numbers, np.nextafter(np.float32(1), 0))
        settings[:, ~drawn] = 0
    return settings


def adjusted(logits: Tensor, adjustments: Adjustments, last: Tensor | None) -> Tensor:
    """Return the logits [rows, vocabulary] after logit biases and penalties.

    If there are adjustments, the result is a float32 copy, otherwise it is `logits` itself. `last` is as for
    `Ops.sample`.
    """
    if not len(adjustments.tokens):
        return logits
    logits = logits.to(tensors.float32, copy=True).contiguous()
    flat = logits.view(-1)
    rows = np.repeat(np.tile(np.arange(len(logits)), ADJUSTMENT_KINDS), np.diff(adjustments.starts))
    tokens = upload(adjustments.tokens.astype(np.int64), logits.device)
    if last is not None and (adjustments.tokens < 0).any():
        # A sampled token can be `NON_FINITE` (-1), which would select a logit of the previous row.
        last_tokens = last[tokens.clamp(max=-1)].clamp(min=0)
        tokens = tensors.where(tokens < 0, last_tokens, tokens)
    indices = upload(rows * logits.shape[1], logits.device) + tokens
    values = upload(adjustments.values, logits.device)
    counts = np.diff(adjustments.starts[:: len(logits)]).tolist()
    changes = (tensors.add, _penalized, tensors.sub)
    for change, positions, operands in zip(changes, indices.split(counts), values.split(counts), strict=True):
        flat[positions] = change(flat[positions], operands)
    return logits


def _penalized(logits: Tensor, penalties: Tensor) -> Tensor:
    return tensors.where(logits > 0, logits / penalties, logits * penalties)


def sample(logits: Tensor, settings: Settings) -> Tensor:
    """Sample a token per row of float32 `logits` [rows, vocabulary] (`Ops.sample`)."""
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
    """Return the token with the largest logit of each row, int64 [rows].

    The lowest token id wins a tie. A row gets `NON_FINITE` (-1) if its largest logit is NaN or infinite.
    """
    largest = logits.argmax(-1, keepdim=True)
    return largest.where(logits.gather(1, largest).isfinite(), NON_FINITE).squeeze(1)


def sample_masked(logits: Tensor, masks: Masks, settings: Settings) -> list[int]:
    """Return a token for each row in `masks`, sampled from the row's allowed tokens.

    `settings` has one column per row in `masks`, in the same order.
    """
    tokens: list[int] = []
    for (row, mask), of_row in zip(masks.items(), settings.T[:, :, None], strict=True):
        allowed = np.unpackbits(mask, bitorder="little", count=logits.shape[1]).view(np.bool_).nonzero()[0]
        if len(allowed) > 1:
            allowed_logits = logits[row].index_select(0, tensors.from_numpy(allowed).to(logits.device)).unsqueeze(0)
            tokens.append(
                int(allowed[int(_draw(allowed_logits, of_row) if of_row[0] > 0 else allowed_logits.argmax())])
            )
        else:
            tokens.append(int(allowed[0]))
    return tokens


def log_probabilities(
    logits: Tensor, tokens: Tensor, alternatives: int, rows: NDArray[np.int32] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, in plain torch (see `Ops.log_probabilities`)."""
    if rows is not None:
        places = upload(rows, logits.device)
        logits, tokens = logits[places], tokens[places]
    table = tensors.log_softmax(logits.float(), dim=-1)
    values, ids = table.topk(min(alternatives, table.shape[1]))
    return table.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1), ids, values


def _draw(logits: Tensor, settings: Settings) -> Tensor:
    """Return a sampled token per row, int64 [rows]. All temperatures must be above 0."""
    temperature, top_k, top_p, min_p, uniform = settings
    probabilities = tensors.softmax(logits / _column(logits, temperature), dim=-1)
    truncated = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    if len(truncated):
        rows = tensors.from_numpy(truncated).to(logits.device)
        probabilities[rows] *= probabilities[rows] >= _least_kept(probabilities[rows], settings[:, truncated])
    return _inverse(probabilities, _column(logits, uniform))


def _inverse(weights: Tensor, shares: Tensor) -> Tensor:
    """Return each row's first token whose cumulative weight exceeds its share, [rows].

    Args:
        weights: [rows, vocabulary], unnormalized probabilities.
        shares: [rows, 1], the fraction of the row's total weight to exceed: uniform random numbers between 0 and 1.
    """
    # Cumulative sums over a whole vocabulary are slow. The search therefore first selects a block of 256 tokens, and
    # then a token in the block.
    if weights.shape[1] <= _BLOCK:
        return _passed(weights, shares).squeeze(1)
    blocks = tensors.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    masses = blocks.sum(-1)
    block = _passed(masses, shares)
    mass = masses.gather(1, block)
    share_in_block = (shares * masses.sum(-1, keepdim=True) - masses.cumsum(-1).gather(1, block) + mass) / mass
    row = _passed(blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1), share_in_block)
    # Rows with NaN logits find no token; the result must still be a valid token id.
    return (block * _BLOCK + row).clamp_(max=weights.shape[1] - 1).squeeze(1)


def _passed(weights: Tensor, shares: Tensor) -> Tensor:
    """Return each row's first index at which the cumulative weight exceeds its share.

    The weights are [rows, numbers]. The shares are fractions of each row's total weight, [rows, 1]. The result is
    [rows, 1].
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    passed = tensors.searchsorted(cumulative, shares * total, right=True)
    last = tensors.searchsorted(cumulative, total)  # rounding must not select a token after the last weight above 0
    return tensors.minimum(passed, last).clamp_(max=weights.shape[1] - 1)


def _least_kept(probabilities: Tensor, settings: Settings) -> Tensor:
    """Return the smallest probability that top-k, top-p and min-p keep, [rows, 1].

    The three filters are applied in this order. Tokens of equal probability are all kept or all removed.
    """
    vocabulary = probabilities.shape[-1]
    top_k, top_p, min_p = (_column(probabilities, column) for column in settings[1:4])
    top_k = top_k.where(top_k > 0, vocabulary)
    # Few candidates are almost always enough, and a sort of the whole vocabulary is slow.
    ordered = probabilities.topk(min(_CANDIDATES, vocabulary)).values
    enough = ((top_p < 1) & (ordered.sum(-1, keepdim=True) >= top_p)) | (ordered[:, -1:] < min_p * ordered[:, :1])
    settled = (top_k <= _CANDIDATES) | ((top_k >= vocabulary) & enough)
    if not bool(settled.all()):
        ordered = probabilities.sort(descending=True).values
    ranked = ordered * (tensors.arange(ordered.shape[-1], device=ordered.device) < top_k)
    mass = ranked.cumsum(-1) / ranked.sum(-1, keepdim=True).where(top_k < vocabulary, ranked.new_tensor(1.0))
    # A token is kept if the mass of all likelier tokens is below top_p, so the most likely token is always kept.
    preceding_mass = tensors.pad(mass[:, :-1], (1, 0))
    is_kept = (ranked > 0) & ((preceding_mass < top_p) | (top_p >= 1)) & (ranked >= min_p * ranked[:, :1])
    return ranked.where(is_kept, ranked.new_tensor(tensors.inf)).min(-1, keepdim=True).values


def _column(like: Tensor, values: Settings) -> Tensor:
    return tensors.from_numpy(np.ascontiguousarray(values)).to(like.device).unsqueeze(1)
