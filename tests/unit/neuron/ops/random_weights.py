"""Random quantized matrices in every format that the native kernels support, with codes and scales as in real files.

The codes of formats with a codebook depend on each other. `weights/random_blocks.py` makes these formats.
"""

import torch
from torch import Tensor

from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor, Weight

# name -> (bits, levels of scales, has minimum, zero, group size)
FORMATS = {
    "Q4_0": (4, 1, False, 8, 32),
    "Q4_1": (4, 1, True, 0, 32),
    "Q5_0": (5, 1, False, 16, 32),
    "Q5_1": (5, 1, True, 0, 32),
    "Q8_0": (8, 1, False, 128, 32),
    "Q4_K": (4, 2, True, 0, 32),
    "Q5_K": (5, 2, True, 0, 32),
    "Q6_K": (6, 2, False, 32, 16),
    "Q2_K": (2, 2, True, 0, 16),
    "IQ4_NL": (4, 1, False, 0, 32),
    "MXFP4": (4, 1, False, 0, 32),
    "IQ4_XS": (4, 2, False, 0, 32),
    "Q3_K": (3, 2, False, 4, 16),
    "TQ2_0": (2, 1, False, 1, 32),
}
TABLES = ("IQ4_NL", "MXFP4", "IQ4_XS")
PLAIN = "bfloat16"
ALL = [*FORMATS, PLAIN]
STRETCH = 256
_ENOUGH = 8


def step(name: str) -> int:
    """Return the number that the columns of a format must be a multiple of."""
    return 16 if name == PLAIN else 32 if FORMATS[name][1] == 1 else STRETCH


def make(name: str, outputs: int, columns: int) -> Weight:
    """Return a random matrix. If it has enough rows, its last rows are hard cases (see `_with_hard_rows`)."""
    if name == PLAIN:
        return _with_hard_rows(torch.randn(outputs, columns)).bfloat16()
    bits, _, has_minimum, zero, group = FORMATS[name]
    codes = _with_hard_rows(torch.randint(0, 1 << bits, (outputs, columns)).float(), lowest=0, highest=(1 << bits) - 1)
    scale = _scale(name, outputs, columns, signed=name in ("Q6_K", "Q3_K", *TABLES))
    minimum = _scale(name, outputs, columns, signed=False) if has_minimum else None
    return GroupwiseTensor(codes.to(torch.uint8), scale, minimum, zero, bits, group, table_of(name))


def table_of(name: str) -> Tensor | None:
    """Return distinct values in random order, including the smallest and the largest."""
    if name not in TABLES:
        return None
    between = torch.randperm(254)[:14] - 127
    return torch.cat((torch.tensor([127]), between, torch.tensor([-128]))).to(torch.int8)


def plain(weight: Weight) -> Tensor:
    """Return the matrix dequantized exactly, in float64."""
    return (weight.dequantize() if isinstance(weight, GroupwiseTensor) else weight).double()


def _with_hard_rows(rows: Tensor, lowest: float = -3.0, highest: float = 3.0) -> Tensor:
    """Replace the last rows: constant lowest, constant highest, and two rows that differ only in the last column."""
    _with_twins(rows)
    if len(rows) >= _ENOUGH:
        rows[-1], rows[-2] = lowest, highest
        rows[-3, -1] = highest if rows[-4, -1] == lowest else lowest
    return rows


def _with_twins(rows: Tensor) -> Tensor:
    if len(rows) >= _ENOUGH:
        rows[-3] = rows[-4]
    return rows


def _scale(name: str, outputs: int, columns: int, signed: bool) -> GroupScale:
    _, levels, _, _, group = FORMATS[name]
    groups = columns // group
    unit = torch.randn(outputs, groups if levels == 1 else columns // STRETCH)
    if name == "MXFP4":
        return GroupScale(_with_twins(torch.exp2((unit * 6 - 20).round())))
    if levels == 1:
        unit[0, 0], unit[0, -1] = -0.0, 6e-8  # the smallest float16 subnormal
        return GroupScale(_with_twins(unit).half())
    low, high = (-128, 128) if signed else (0, 128 if name == "Q2_K" else 256)
    codes = torch.randint(low, high, (outputs, groups), dtype=torch.int8 if signed else torch.uint8)
    codes[0, 0], codes[-1, -1] = low, high - 1
    unit = _with_twins(unit / 16)
    return GroupScale(unit if name in TABLES else unit.half(), _with_twins(codes))
