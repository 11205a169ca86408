"""Sampling of tokens in Triton kernels, without sorts and waits.

The result is the same as in `ops.sampling`. The weight of a token is its unnormalized probability. A first kernel
computes the largest logit and the sum of the weights of each block of tokens. In a second kernel, one program per row
selects the token: the largest logit, or the first token at which the cumulative weight exceeds the share of the total
weight that the row's uniform random number specifies. Top-k and top-p keep all logits above a threshold, which the
kernel finds by bisection. Other rows do not change the result of a row.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from helexa.neuron.ops.sampling import Masks, Settings, upload
from helexa.neuron.ops.triton.launch_and_graphs import launch

_BLOCK = 1024
_CANDIDATES = 2048  # logits that `_draw` processes at once; more candidates are processed in pieces
_NONE = tl.constexpr(0x7FFFFFFF)


def sample(logits: Tensor, settings: Settings) -> Tensor:
    """Return a sampled token per row, int64 [rows] on the device.

    A row whose largest logit is NaN or infinite gets -1.

    Args:
        logits: [rows, vocabulary], any float dtype.
    """
    rows, vocabulary = logits.shape
    temperature, top_k, top_p, min_p, _ = settings
    draws = bool((temperature > 0).any())
    cuts = draws and bool(((top_k > 0) | (top_p < 1) | (min_p > 0))[temperature > 0].any())
    on_device = upload(np.ascontiguousarray(settings), logits.device) if draws else None
    blocks = triton.cdiv(vocabulary, _BLOCK)
    # `greatest` and `mass` are not parts of one allocation, because Triton recompiles a kernel if a pointer is not
    # aligned to 16 bytes.
    greatest, mass = (torch.empty((rows, blocks), device=logits.device) for _ in range(2))
    place = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    launch(
        _sum_up_blocks,
        (blocks, rows),
        *(logits, logits.stride(0), on_device, rows, vocabulary, greatest, mass, place),
        warps=4,
        BLOCK=_BLOCK,
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    candidates = torch.empty((rows, _CANDIDATES) if cuts else 1, device=logits.device)
    launch(
        _choose_token,
        (rows,),
        *(logits, logits.stride(0), on_device, rows, vocabulary, greatest, mass, place),
        *(candidates, torch.empty(candidates.shape, dtype=torch.int32, device=logits.device), tokens),
        warps=8,
        BLOCK=_BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        CANDIDATES=_CANDIDATES,
        CUTS=cuts,
    )
    return tokens


def masked(logits: Tensor, masks: Masks) -> Tensor:
    """Return copies of the rows in `masks`, in its order; -inf for disallowed tokens."""
    device, vocabulary = logits.device, logits.shape[1]
    rows = upload(np.array(list(masks), np.int32), device)
    bits = upload(np.stack(list(masks.values())), device)
    out = torch.empty((len(masks), vocabulary), dtype=logits.dtype, device=device)
    grid = (triton.cdiv(vocabulary, _BLOCK), len(masks))
    launch(
        _mask_rows, grid, logits, logits.stride(0), rows, bits, bits.stride(0), out, vocabulary, warps=4, BLOCK=_BLOCK
    )
    return out


@triton.jit
def _mask_rows(logits, stride, rows, masks, mask_stride, out, VOCABULARY, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = tokens < tl.minimum(VOCABULARY, mask_stride * 8)
    byte = tl.load(masks + row * mask_stride + (tokens >> 3), within, 0).to(tl.int32)
    x = tl.load(logits + tl.load(rows + row).to(tl.int64) * stride + tokens, within, 0.0)
    x = tl.where((byte >> (tokens & 7)) & 1 == 1, x, float("-inf"))
    tl.store(out + row.to(tl.int64) * VOCABULARY + tokens, x, tokens < VOCABULARY)


@triton.jit(do_not_specialize=["rows"])
def _sum_up_blocks(logits, stride, settings, rows, VOCABULARY, greatest, mass, place, BLOCK: tl.constexpr):
    """Write a block's largest logit, the first token with it, and the sum of weights.

    The weight of a token is exp((logit - largest logit of the block) / temperature).
    """
    block, row = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + tokens, tokens < VOCABULARY, float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)  # NaN becomes infinite, so that the row is reported as non-finite
    largest = tl.max(x)
    at = row * tl.num_programs(0) + block
    tl.store(greatest + at, largest)
    tl.store(place + at, tl.min(tl.where(x == largest, tokens, _NONE)))
    if settings is not None:
        temperature = tl.load(settings + row)
        scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
        finite_peak = tl.where((largest > float("-inf")) & (largest < float("inf")), largest, 0.0)
        tl.store(mass + at, tl.sum(tl.exp((x - finite_peak) * scale)))


@triton.jit(do_not_specialize=["rows"])
def _choose_token(
    logits, stride, settings, rows, VOCABULARY, greatest, mass, place, candidates, candidate_tokens, chosen,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    count = tl.cdiv(VOCABULARY, BLOCK)
    blocks = tl.arange(0, BLOCKS)
    exists = blocks < count
    peaks = tl.load(greatest + row * count + blocks, exists, float("-inf"))
    peak = tl.max(peaks)
    token = tl.min(tl.where(peaks == peak, tl.load(place + row * count + blocks, exists, _NONE), _NONE))
    if (peak == float("inf")) | (peak == float("-inf")):
        tl.store(chosen + row, -1)
        return
    tl.store(chosen + row, token.to(tl.int64))
    if settings is None:
        return
    temperature = tl.load(settings + row)
    if temperature <= 0:
        return
    scale = 1.0 / temperature
    top_k, top_p = tl.load(settings + rows + row), tl.load(settings + 2 * rows + row)
    min_p, share = tl.load(settings + 3 * rows + row), tl.load(settings + 4 * rows + row)
    logits += row.to(tl.int64) * stride
    masses = tl.load(mass + row * count + blocks, exists, 0.0) * tl.exp((peaks - peak) * scale)
    total = tl.sum(masses)
    if CUTS:  # noqa: SIM102 - Triton decides this condition at compile time
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            top_k = tl.where(top_k > 0, top_k, VOCABULARY)
            # Find `low`, a lower bound of the logits that the filters keep. With top-k, `low` is the k-th largest block
            # maximum. With min-p, logits below `low` are too small. With top-p, all logits below `low` together weigh
            # too little. If top-k and top-p are both set, min-p does not raise `low`, because top-p takes a share of
            # the weight of all tokens that top-k keeps, including tokens below min-p.
            no_top_k = top_k >= VOCABULARY
            low = tl.where(no_top_k, float("-inf"), _kth(peaks, top_k, peak))
            small = peak + tl.log(tl.maximum(min_p, 1e-30)) * temperature - 1e-3
            low = tl.where(no_top_k | (top_p >= 1), tl.maximum(low, small), low)
            light = peak + tl.log(tl.maximum((1 - top_p) * total / VOCABULARY, 1e-30)) * temperature - 1e-3
            low = tl.where(no_top_k & (top_p < 1), tl.maximum(low, light), low)
            candidates += row.to(tl.int64) * CANDIDATES
            candidate_tokens += row.to(tl.int64) * CANDIDATES
            size = 0
            for start in range(0, VOCABULARY, CANDIDATES):
                tokens = start + tl.arange(0, CANDIDATES)
                x = tl.load(logits + tokens, tokens < VOCABULARY, float("-inf")).to(tl.float32)
                is_kept = ((x >= low) & (x > float("-inf"))).to(tl.int32)
                at = size + tl.cumsum(is_kept, 0) - 1
                fits = (is_kept > 0) & (at < CANDIDATES)
                tl.store(candidates + at, x, fits)
                tl.store(candidate_tokens + at, tokens, fits)
                size += tl.sum(is_kept)
            tl.debug_barrier()  # the following code reads values that other threads have stored
            if size <= CANDIDATES:
                at = _draw(candidates, size, low, peak, scale, total, top_k, top_p, min_p, share, CANDIDATES)
                token = tl.load(candidate_tokens + at)
            else:
                token = _draw(logits, VOCABULARY, low, peak, scale, total, top_k, top_p, min_p, share, CANDIDATES)
            tl.store(chosen + row, token.to(tl.int64))
            return
    running = tl.cumsum(masses, 0)
    last = tl.max(tl.where(masses > 0, blocks, 0))
    block = tl.minimum(tl.min(tl.where((running > share * total) & (masses > 0), blocks, BLOCKS)), last)
    preceding_mass = tl.sum(tl.where(blocks < block, masses, 0.0))
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tokens, tokens < VOCABULARY, float("-inf")).to(tl.float32)
    weights = tl.exp((x - peak) * scale)
    passed = (preceding_mass + tl.cumsum(weights, 0) > share * total) & (weights > 0)
    last = tl.max(tl.where(weights > 0, tokens, 0))
    token = tl.minimum(tl.min(tl.where(passed, tokens, _NONE)), last)
    tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def _key(x):
    """Return int32 numbers in the order of the float32 numbers x, for bisection."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _of_key(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high):
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _kth(x, k, largest):
    """Return the k-th largest number in x; -inf if fewer than k are above -inf."""
    low, high = _key(tl.full([], float("-inf"), tl.float32)), _key(largest)
    middle = _between(low, high)
    while middle > low:
        fewer = tl.sum((x > _of_key(middle)).to(tl.int32)) < k
        high = tl.where(fewer, middle, high)
        low = tl.where(fewer, low, middle)
        middle = _between(low, high)
    return tl.where(tl.sum((x > float("-inf")).to(tl.int32)) < k, float("-inf"), _of_key(high))


@triton.jit
def _above(source, size, bound, peak, scale, CANDIDATES: tl.constexpr):
    """Return the count of logits above `bound`, and the sum of their weights.

    The weight of a logit is `exp((logit - peak) * scale)`.
    """
    count, mass = 0.0, 0.0
    for start in range(0, size, CANDIDATES):
        at = start + tl.arange(0, CANDIDATES)
        x = tl.load(source + at, at < size, float("-inf")).to(tl.float32)
        count += tl.sum((x > bound).to(tl.float32))
        mass += tl.sum(tl.where(x > bound, tl.exp((x - peak) * scale), 0.0))
    return count, mass


@triton.jit
def _least(source, size, low, peak, scale, most, most_mass, CANDIDATES: tl.constexpr):
    """Return the smallest logit x that top-k and top-p keep.

    The logits above x are fewer than `most`, and the sum of their weights is less than `most_mass`. x is at least
    `low`.
    """
    low, high = _key(low) - 1, _key(peak)
    middle = _between(low, high)
    while middle > low:
        count, mass = _above(source, size, _of_key(middle), peak, scale, CANDIDATES)
        is_kept = (count < most) & (mass < most_mass)
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle)
        middle = _between(low, high)
    return _of_key(high)


@triton.jit
def _draw(source, size, low, peak, scale, total, top_k, top_p, min_p, share, CANDIDATES: tl.constexpr):
    """Return the index of the logit that `share` selects after all filters.

    `share` is a uniform random number; the filters are top-k, top-p and min-p.

    Args:
        source: address of all logits of the row, or of the candidates that may remain after the filters.
        size: number of logits at `source`.
        low: lower bound of the logits that remain after top-k and top-p.
        peak: largest logit of the row.
        scale: 1 / temperature.
        total: sum of the weights of all tokens of the row.
    """
    least = tl.maximum(low, -3.0e38)
    if top_k < size:
        least = _least(source, size, least, peak, scale, top_k, float("inf"), CANDIDATES)
        count, mass = _above(source, size, least, peak, scale, CANDIDATES)
        total = mass + (top_k - count) * tl.exp((least - peak) * scale)
    if top_p < 1:
        least = _least(source, size, least, peak, scale, float("inf"), top_p * total, CANDIDATES)
    kept_mass = 0.0
    for start in range(0, size, CANDIDATES):
        at = start + tl.arange(0, CANDIDATES)
        x = tl.load(source + at, at < size, float("-inf")).to(tl.float32)
        weights = tl.exp((x - peak) * scale)
        kept_mass += tl.sum(tl.where((x >= least) & (weights >= min_p), weights, 0.0))
    preceding_mass, token, last = 0.0, _NONE, 0
    for start in range(0, size, CANDIDATES):
        at = start + tl.arange(0, CANDIDATES)
        x = tl.load(source + at, at < size, float("-inf")).to(tl.float32)
        weights = tl.exp((x - peak) * scale)
        weights = tl.where((x >= least) & (weights >= min_p), weights, 0.0)
        passed = (preceding_mass + tl.cumsum(weights, 0) > share * kept_mass) & (weights > 0)
        token = tl.minimum(token, tl.min(tl.where(passed, at, _NONE)))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, at, 0)))
        preceding_mass += tl.sum(weights)
    return tl.minimum(token, last)
