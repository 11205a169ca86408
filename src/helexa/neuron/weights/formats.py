"""In-memory formats of weights read from a model file."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupScale:
    """One number (a scale or a minimum) per quantization group of each row, [N, G], as stored in the file.

    Attributes:
        unit: float16 or float32 [N, U]; U divides G.
        codes: int8 or uint8 [N, G]; each number is its code times its unit, and each unit applies to G / U adjacent
            groups. If None, U equals G and the units are the numbers.
    """

    unit: Tensor
    codes: Tensor | None = None

    def values(self) -> Tensor:
        """Return the numbers as float32 [N, G]; the products of codes and units are exact."""
        if self.codes is None:
            return self.unit.float()
        return (self.codes.unflatten(-1, (self.unit.shape[-1], -1)).float() * self.unit.float()[..., None]).flatten(-2)

    @property
    def nbytes(self) -> int:
        """Bytes of units and codes."""
        return self.unit.nbytes + (0 if self.codes is None else self.codes.nbytes)

    def each(self, change: Callable[[Tensor], Tensor]) -> "GroupScale":
        """Return a copy with `change` applied to each tensor; `change` may reorder rows but not columns."""
        return GroupScale(change(self.unit), None if self.codes is None else change(self.codes))


@dataclass(frozen=True)
class GroupwiseTensor:
    """A quantized matrix with the exact codes and scales of its file.

    `weight = scale * (code - zero) + minimum`, or with a table `weight = scale * table[code]`.

    Attributes:
        codes: uint8 [N, K], one unsigned code per byte, less than 2 ** bits.
        scale: one scale per group along K.
        minimum: one minimum per group along K, or None if all minimums are 0.
        zero: the code that represents the value 0, before the minimum is added; 0 with a table.
        bits: bits per code: 4, 5, 6 or 8; 4 with a table.
        group_size: number of codes that share a scale, 16 or 32; divides K.
        table: int8 [16], value of each code; None if codes are values. Not combined with a minimum.
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
        """Bytes of the codes, scales and minimums, without the small table."""
        minimum = 0 if self.minimum is None else self.minimum.nbytes
        return self.codes.nbytes + self.scale.nbytes + minimum

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the plain matrix [N, K] in `dtype`, computed in float32."""
        numbers = self.codes.float().sub_(self.zero) if self.table is None else self.table.float()[self.codes.int()]
        groups = numbers.unflatten(-1, (-1, self.group_size))  # [N, G, group_size]
        groups.mul_(self.scale.values().unsqueeze(-1))
        if self.minimum is not None:
            groups.add_(self.minimum.values().unsqueeze(-1))
        return groups.flatten(-2).to(dtype)

    def each(self, change: Callable[[Tensor], Tensor]) -> "GroupwiseTensor":
        """Return a copy with `change` applied to each tensor; `change` may reorder rows but not columns."""
        minimum = None if self.minimum is None else self.minimum.each(change)
        return replace(self, codes=change(self.codes), scale=self.scale.each(change), minimum=minimum)

    def rows(self, indices: Tensor) -> "GroupwiseTensor":
        """Return the rows at `indices` [T] as a quantized matrix."""
        return self.each(lambda tensor: tensor[indices])

    def on_meta(self, rows: int) -> "GroupwiseTensor":
        """Return a matrix of `rows` rows in this format on torch's meta device."""
        return self.each(lambda tensor: torch.empty((rows, tensor.shape[1]), dtype=tensor.dtype, device="meta"))

    def to(self, device: torch.device) -> "GroupwiseTensor":
        """Return the matrix on another device."""
        moved = self.each(lambda tensor: tensor.to(device))
        return moved if self.table is None else replace(moved, table=self.table.to(device))


Weight = Tensor | GroupwiseTensor
"""A plain or a quantized weight."""
