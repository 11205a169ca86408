"""In-memory formats of weights: plain torch tensors and quantized matrices."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.weights.part import block_numbers


@dataclass(frozen=True)
class GroupScale:
    """The scales, or the minimums, of a quantized matrix: one number per group of adjacent columns in each row.

    The numbers have the shape [N, G], for N rows with G groups each. The class stores the numbers in the form of the
    model file, which is either one floating-point number per group, or integer codes with a unit that several groups
    share.

    Attributes:
        unit: float16 or float32 [N, U]. U divides G, and each unit applies to G / U adjacent groups.
        codes: int8 or uint8 [N, G]. A number is the product of its code and its unit. If `codes` is None, U equals G
            and the units are the numbers.
    """

    unit: Tensor
    codes: Tensor | None = None

    def values(self) -> Tensor:
        """Return one number for each of the G groups of N rows, as float32 [N, G].

        The products of codes and units are exact in float32.
        """
        if self.codes is None:
            return self.unit.float()
        return (self.codes.unflatten(-1, (self.unit.shape[-1], -1)).float() * self.unit.float()[..., None]).flatten(-2)

    @property
    def nbytes(self) -> int:
        """Size of `unit` and `codes`, in bytes."""
        return self.unit.nbytes + (0 if self.codes is None else self.codes.nbytes)

    def each(self, change: Callable[[Tensor], Tensor]) -> "GroupScale":
        """Return a copy in which each tensor is replaced by `change(tensor)`.

        `change` is applied to `unit` and `codes`, which differ in their number of columns. It may reorder rows. It may
        also reorder blocks of columns, if no unit is shared by several blocks.
        """
        return GroupScale(change(self.unit), None if self.codes is None else change(self.codes))


@dataclass(frozen=True)
class GroupwiseTensor:
    """A quantized matrix [N, K]: one integer code per weight, and one scale per group of adjacent columns in a row.

    A matrix that was quantized in the model file keeps the exact codes and scales of the file. A weight is `scale *
    (code - zero) + minimum`. In formats with a table of values, a weight is `scale * table[code]`.

    Attributes:
        codes: uint8 [N, K], one unsigned code per byte, less than 2 ** bits.
        scale: one scale per group.
        minimum: one minimum per group, or None if all minimums are 0.
        zero: the code that represents the value 0, before the minimum is added. With a table, `zero` is 0.
        bits: bits per code: 4, 5, 6 or 8. With a table, 4.
        group_size: number of columns that share a scale, 16 or 32. It divides K.
        table: int8 [16], the value of each code. None if the codes are used as numbers. A matrix with a table has no
            minimums.
    """

    codes: Tensor
    scale: GroupScale
    minimum: GroupScale | None
    zero: int
    bits: int
    group_size: int
    table: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, [N, K]."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Size of the codes, scales and minimums in bytes. The 16 bytes of `table` are not counted."""
        minimum = 0 if self.minimum is None else self.minimum.nbytes
        return self.codes.nbytes + self.scale.nbytes + minimum

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized matrix [N, K] in `dtype`. The computation uses float32."""
        numbers = self.codes.float().sub_(self.zero) if self.table is None else self.table.float()[self.codes.int()]
        groups = numbers.unflatten(-1, (-1, self.group_size))  # [N, G, group_size]
        groups.mul_(self.scale.values().unsqueeze(-1))
        if self.minimum is not None:
            groups.add_(self.minimum.values().unsqueeze(-1))
        return groups.flatten(-2).to(dtype)

    def each(self, change: Callable[[Tensor], Tensor]) -> "GroupwiseTensor":
        """Return a copy in which the tensors of the codes, scales and minimums are replaced by `change(tensor)`.

        These tensors differ in their number of columns. `change` may reorder rows. It may also reorder blocks of
        columns, if no quantization group and no unit (see `GroupScale`) is shared by several blocks.
        """
        minimum = None if self.minimum is None else self.minimum.each(change)
        return replace(self, codes=change(self.codes), scale=self.scale.each(change), minimum=minimum)

    def rows(self, indices: Tensor) -> "GroupwiseTensor":
        """Return a quantized matrix [T, K] with copies of the T rows at `indices`. K is the number of columns."""
        return self.each(lambda tensor: tensor[indices])

    def columns(self, numbers: NDArray[np.int64]) -> "Weight":
        """Return a matrix with the columns `numbers`.

        The result is quantized if the columns are whole units of `GroupScale`. Otherwise it is a float32 tensor.
        """
        units = min(scales.unit.shape[1] for scales in (self.scale, self.minimum) if scales is not None)
        blocks = block_numbers(numbers, self.shape[1] // units)
        if blocks is None:
            return self.dequantize()[:, numbers]
        return self.each(lambda tensor: tensor.unflatten(-1, (units, -1))[:, blocks].flatten(-2))

    def on_meta(self, rows: int) -> "GroupwiseTensor":
        """Return a matrix with `rows` rows and the same quantization format on torch's meta device."""
        return self.each(lambda tensor: torch.empty((rows, tensor.shape[1]), dtype=tensor.dtype, device="meta"))

    def to(self, device: torch.device) -> "GroupwiseTensor":
        """Return a copy of the matrix on `device`."""
        moved = self.each(lambda tensor: tensor.to(device))
        return moved if self.table is None else replace(moved, table=self.table.to(device))


Weight = Tensor | GroupwiseTensor
"""A weight: a plain tensor or a quantized matrix."""
