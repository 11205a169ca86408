"""In-memory formats of weights: plain torch tensors and quantized matrices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.tensors import Device, DType, Tensor
from helexa.neuron.weights.model_file import block_numbers


@dataclass(frozen=True)
class GroupScale:
    """The scales or minimums of a quantized matrix, one per group: [rows, groups].

    Each scale or minimum is stored as in the model file: as a floating-point number, or as an integer code with a unit
    that several groups share. N is the number of rows, and G the number of groups in a row.
    """

    unit: Tensor  # float16 or float32 [N, U]. U divides G, and each unit applies to G / U adjacent groups.
    # int8 or uint8 [N, G]. A number is the product of its code and its unit. If `codes` is None, U equals G and the
    # units are the numbers.
    codes: Tensor | None = None

    def values(self) -> Tensor:
        """Return one number for each of the G groups of N rows, as float32 [N, G]."""
        if self.codes is None:
            return self.unit.float()
        # These products are exact in float32.
        return (self.codes.unflatten(-1, (self.unit.shape[-1], -1)).float() * self.unit.float()[..., None]).flatten(-2)

    @property
    def nbytes(self) -> int:
        """Size of `unit` and `codes`, in bytes."""
        return self.unit.nbytes + (0 if self.codes is None else self.codes.nbytes)

    def each(self, change: Callable[[Tensor], Tensor]) -> "GroupScale":
        """Return a copy in which each tensor is replaced by `change(tensor)`.

        `change` may reorder rows. It may also reorder blocks of columns, if no unit is shared by several blocks.
        """
        return GroupScale(change(self.unit), None if self.codes is None else change(self.codes))


@dataclass(frozen=True)
class GroupwiseTensor:
    """A quantized matrix [rows, columns]: a code per weight, and a scale per group.

    A group is adjacent columns in a row. A matrix that was quantized in the model file keeps the exact codes and scales
    of the file. A weight is `scale * (code - zero) + minimum`. In formats with a table of values, a weight is `scale *
    table[code]`. N is the number of rows, and K the number of columns.
    """

    codes: Tensor  # uint8 [N, K], one unsigned code per byte, less than 2 ** bits
    scale: GroupScale  # one scale per group
    minimum: GroupScale | None  # one minimum per group, or None if all minimums are 0
    zero: int  # the code that represents the value 0, before the minimum is added. With a table, `zero` is 0.
    bits: int  # bits per code: 2, 3, 4, 5, 6 or 8. With a table, 4.
    group_size: int  # number of columns that share a scale, 16 or 32. It divides K.
    # int8 [16], the value of each code. None if the codes are used as numbers. A matrix with a table has no minimums.
    table: Tensor | None = None
    # The combinations of codes that occur in the matrix, uint8 [entries, n], in ascending order of their numbers (see
    # `weights/gguf/table_blocks.py`). Each n adjacent codes of a row, without their bit 3, are an entry. None if the
    # codes are independent of each other.
    codebook: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [rows, columns]."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Size of the codes, scales and minimums in bytes, without `table`."""
        minimum = 0 if self.minimum is None else self.minimum.nbytes
        return self.codes.nbytes + self.scale.nbytes + minimum

    def dequantize(self, dtype: DType | None = None) -> Tensor:
        """Return the matrix in `dtype` (None for float32), computed in float32."""
        numbers = self.codes.float().sub_(self.zero) if self.table is None else self.table.float()[self.codes.int()]
        groups = numbers.unflatten(-1, (-1, self.group_size))  # [N, G, group_size]
        groups.mul_(self.scale.values().unsqueeze(-1))
        if self.minimum is not None:
            groups.add_(self.minimum.values().unsqueeze(-1))
        return groups.flatten(-2).to(tensors.float32 if dtype is None else dtype)

    def each(self, change: Callable[[Tensor], Tensor]) -> "GroupwiseTensor":
        """Return a copy with `change` applied to the codes, scales and minimums.

        `change` may reorder rows. It may also reorder blocks of columns, if no quantization group and no unit (see
        `GroupScale`) is shared by several blocks.
        """
        minimum = None if self.minimum is None else self.minimum.each(change)
        return replace(self, codes=change(self.codes), scale=self.scale.each(change), minimum=minimum)

    def rows(self, indices: Tensor) -> "GroupwiseTensor":
        """Return a quantized matrix [T, columns] with copies of the T rows at `indices`."""
        return self.each(lambda tensor: tensor[indices])

    def columns(self, numbers: NDArray[np.int64]) -> "Weight":
        """Return a matrix with the columns `numbers`, quantized if possible, else float32.

        A quantized result is possible if all columns that share a unit (see `GroupScale`) stay together, in order.
        """
        units = min(scales.unit.shape[1] for scales in (self.scale, self.minimum) if scales is not None)
        blocks = block_numbers(numbers, self.shape[1] // units)
        # `numbers` lacks some of the columns that share a unit (see `GroupScale`), or lists them in another order. A
        # quantized result is then impossible, so the result is a float32 tensor.
        if blocks is None:
            return self.dequantize()[:, numbers]
        return self.each(lambda tensor: tensor.unflatten(-1, (units, -1))[:, blocks].flatten(-2))

    def on_meta(self, rows: int) -> "GroupwiseTensor":
        """Return a matrix of `rows` rows in the same format on the meta device."""
        return self.each(lambda tensor: tensors.empty((rows, tensor.shape[1]), dtype=tensor.dtype, device="meta"))

    def to(self, device: Device) -> "GroupwiseTensor":
        """Return the matrix on `device`, except for `codebook`, which is not moved."""
        moved = self.each(lambda tensor: tensor.to(device))
        return moved if self.table is None else replace(moved, table=self.table.to(device))


def joined(parts: Sequence[GroupwiseTensor]) -> GroupwiseTensor:
    """Return a matrix with the rows of all `parts`, which must have the same format."""
    if len(parts) == 1:
        return parts[0]
    minima = [part.minimum for part in parts if part.minimum is not None]
    return replace(
        parts[0],
        codes=tensors.cat([part.codes for part in parts]),
        scale=_joined_scales([part.scale for part in parts]),
        minimum=_joined_scales(minima) if minima else None,
    )


def _joined_scales(scales: Sequence[GroupScale]) -> GroupScale:
    codes = [scale.codes for scale in scales if scale.codes is not None]
    return GroupScale(tensors.cat([scale.unit for scale in scales]), tensors.cat(codes) if codes else None)


Weight = Tensor | GroupwiseTensor  # A weight: a plain tensor or a quantized matrix
