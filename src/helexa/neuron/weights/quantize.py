"""Load-time quantization in plain torch, the reference for the native kernel.

The scale of each group is found by a search over several starting scales. For each starting scale, the weights are
rounded to codes, and the scale is fitted to these codes by least squares. The fitted scale with the smallest squared
error is used. llama.cpp quantizes to K types in the same way (`make_qkx2_quants`, `make_qx_quants` in ggml-quants.c).
Unlike in llama.cpp, all columns have the same weight in the least squares, because this gives better results for real
models.
"""

from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.quantization_formats import QuantFormat
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor, joined

# Starting points of the search. Each number is added to the largest code to compute one starting scale.
STEPS = (-1.0, -0.4, 0.2, 0.8)

# Maximum absolute value of a weight that can be quantized. The scales of larger weights would not fit in float16.
LARGEST = 32768.0

_CHUNK = 1 << 18  # weights per chunk on the CPU, sized for its cache
_LARGE_CHUNK = 1 << 22  # weights per chunk on a GPU, where small operations are bound by kernel launches


def quantize(weight: Tensor, quant_format: QuantFormat) -> GroupwiseTensor | None:
    """Quantize a matrix to the format `quant_format`, in plain torch.

    Args:
        weight: floating-point matrix [rows, K], maybe on the meta device. `quant_format.fits(K)` must be true.

    Returns:
        The quantized matrix. None if a weight is not finite or its absolute value is larger than `LARGEST`.
    """
    if weight.is_meta:
        return _on_meta(quant_format, weight.shape)
    weights_per_chunk = _CHUNK if weight.device.type == "cpu" else _LARGE_CHUNK
    chunks = [_rows(rows.float(), quant_format) for rows in weight.split(max(weights_per_chunk // weight.shape[1], 1))]
    quantized = [chunk for chunk in chunks if chunk is not None]
    return joined(quantized) if len(quantized) == len(chunks) else None


@tensors.cached()
def _on_meta(quant_format: QuantFormat, shape: tuple[int, ...]) -> GroupwiseTensor:
    row = _rows(tensors.zeros(1, shape[1]), quant_format)
    assert row is not None
    return row.on_meta(shape[0])


def _rows(rows: Tensor, quant_format: QuantFormat) -> GroupwiseTensor | None:
    if not bool(rows.abs().amax() <= LARGEST):
        return None
    groups = rows.unflatten(-1, (-1, quant_format.group_size))  # [N, G, group_size]
    stretches = rows.shape[1] // quant_format.stretch if quant_format.stretch else None
    if quant_format.minimum:
        scale, low = _line(groups, 2**quant_format.bits - 1)
        scale, minimum = _scale(scale, stretches, 63), _scale(low, stretches, 63)
        groups = groups - minimum.values()[..., None]
    else:
        scale, minimum = _scale(_ray(groups, quant_format.bits), stretches, -128), None
    codes = (
        (groups * _inverse(scale.values())[..., None])
        .round_()
        .add_(quant_format.zero)
        .clamp_(0, 2**quant_format.bits - 1)
    )
    return GroupwiseTensor(
        codes.flatten(-2).byte(), scale, minimum, quant_format.zero, quant_format.bits, quant_format.group_size
    )


def _line(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return each group's scale and minimum, [rows, groups], for codes 0 to `most`.

    The function searches for the pair with the smallest squared error per group. Minimums are at most 0.
    """
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1)
    count, total = groups.shape[-1], groups.sum(-1)
    slope = _inverse(high - low)
    scale, minimum, best = tensors.zeros_like(low), low.clone(), tensors.zeros_like(low)
    for step in STEPS:
        codes = ((groups - low[..., None]) * (slope * (most + step))[..., None]).round_().clamp_(0, most)
        sum_l, sum_ll, sum_lx = codes.sum(-1), codes.square().sum(-1), (codes * groups).sum(-1)
        inverse = _inverse(count * sum_ll - sum_l * sum_l)
        m = (sum_ll * total - sum_l * sum_lx) * inverse
        s = (count * sum_lx - total * sum_l) * inverse
        # If the fitted minimum is positive, or all codes are equal, fit a line through 0 instead.
        through = (m > 0) | ((inverse == 0) & (sum_ll > 0))
        m = m.masked_fill_(through, 0)
        s = tensors.where(through, (sum_lx * _inverse(sum_ll)).clamp_(min=0), s)
        # Find the smallest squared error by its largest reduction, which can be computed without a second pass.
        gain = s * sum_lx + m * total  # reduction of the squared error
        better = gain > best
        best = tensors.where(better, gain, best)
        scale, minimum = tensors.where(better, s, scale), tensors.where(better, m, minimum)
    return scale, minimum


def _ray(groups: Tensor, bits: int) -> Tensor:
    """Return each group's scale, [rows, groups], for signed `bits`-bit codes.

    Below 8 bits, the function searches for the scale with the smallest squared error per group. The scale may be
    negative.
    """
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    if bits == 8:  # a search would not improve 8-bit codes
        return peak.abs() / 127
    least = 2 ** (bits - 1)
    scale, best = tensors.zeros_like(peak), tensors.zeros_like(peak)
    for step in STEPS:
        codes = (groups * (-(least + step) * _inverse(peak))[..., None]).round_().clamp_(-least, least - 1)
        sum_ll, sum_lx = codes.square().sum(-1), (codes * groups).sum(-1)
        s = sum_lx * _inverse(sum_ll)
        gain = s * sum_lx
        better = gain > best
        best, scale = tensors.where(better, gain, best), tensors.where(better, s, scale)
    return scale


def _scale(values: Tensor, stretches: int | None, most: int) -> GroupScale:
    """Encode scales or minimums as float16, or as multiples of float16 units.

    Args:
        values: one scale or minimum per group.
        stretches: number of stretches per row. A stretch is several adjacent groups that share a unit. None to encode
            each value as float16.
        most: integer code of the value with the largest magnitude in its stretch.
    """
    if stretches is None:
        return GroupScale(values.half())
    values = values.unflatten(-1, (stretches, -1))
    peak = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    codes = (values * (most * _inverse(peak))).round_().clamp_(max=most if most > 0 else -most - 1)
    return GroupScale(
        (peak / most).half().squeeze(-1), codes.flatten(-2).to(tensors.uint8 if most > 0 else tensors.int8)
    )


def _inverse(values: Tensor) -> Tensor:
    return tensors.where(values == 0, 0, 1 / values)
