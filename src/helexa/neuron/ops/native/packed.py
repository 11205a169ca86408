"""Weights in the tile layout of the native kernels, which `kernels/tiles.h` and `kernels/plain.c` define."""

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.constants import GROUP, LANES, STRETCH_GROUPS
from helexa.neuron.ops.native.kernel_library import TYPES, Form, KernelLibrary
from helexa.neuron.weights.formats import GroupScale, GroupwiseTensor, Weight
from helexa.neuron.weights.quantization.quant_form import QuantForm

_STRETCH = STRETCH_GROUPS * GROUP


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix [outputs, columns] in the tile layout of the native kernels (see `kernels/tiles.h`).

    Attributes:
        data: uint8, the bytes of all tiles.
        outputs: number of rows.
        columns: number of columns.
        number: number of the quantization format in the C code; None for bfloat16.
    """

    data: Tensor
    outputs: int
    columns: int
    number: int | None

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tiles."""
        return self.data.nbytes


class HugeMemory:
    """Allocator for weight memory, which uses huge pages if the operating system supports them.

    Huge pages are faster here, because each step reads all weights. With the weights in a mapped file, whose pages have
    4 KiB, decoding took 1 to 5 % longer.

    Args:
        chunk: bytes per allocation from the operating system.
    """

    def __init__(self, chunk: int = 64 << 20) -> None:
        self._chunk = chunk
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return zeroed memory, uint8 [size], aligned to 64 bytes."""
        if len(self._free) < size:
            memory = mmap.mmap(-1, max(size, self._chunk), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(memory, dtype=torch.uint8)
        result, self._free = self._free[:size], self._free[-(-size // 64) * 64 :]
        return result


def pack(library: KernelLibrary, weight: Weight, memory: HugeMemory) -> PackedMatrix:
    """Return a weight [N, K] in the tile layout of the native kernels. K must be a multiple of 16.

    If no kernel supports the format of a quantized weight, the weight is dequantized to bfloat16.

    Args:
        memory: allocator for the bytes of the packed matrix.
    """
    outputs, columns = weight.shape
    form, number = _format(library, weight)
    data = memory.take(library.packed_bytes(number, outputs, columns))
    size = {"matrix": data, "outputs": outputs, "columns": columns}
    if isinstance(weight, GroupwiseTensor) and form is not None:
        unit, scale = _unit_and_codes(weight.scale, form[-1])
        minimum_unit, minimum = _unit_and_codes(weight.minimum, form[-1])
        table = None if weight.table is None else (weight.table.int() + 128).byte()
        tensors = {"unit": unit, "scale": scale, "minimum_unit": minimum_unit, "minimum": minimum, "table": table}
        tensors = {name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()}
        library.call("pack", codes=weight.codes.contiguous(), **tensors, **size, number=number)
    else:
        plain = weight.dequantize(torch.bfloat16) if isinstance(weight, GroupwiseTensor) else weight.bfloat16()
        library.call("pack_plain", weights=plain.contiguous(), **size)
    return PackedMatrix(data, outputs, columns, number)


def packed_bytes(library: KernelLibrary, weight: Weight) -> int:
    """Return the number of bytes of the matrix that `pack` returns. The weight may be on torch's meta device."""
    return library.packed_bytes(_format(library, weight)[1], *weight.shape)


def quantize(library: KernelLibrary, weight: Tensor, form: QuantForm, memory: HugeMemory) -> PackedMatrix | None:
    """Quantize a plain weight [N, K] to `form`, and return it in the tile layout of the native kernels.

    Args:
        form: format to quantize to. `form.fits(K)` must be True.
        memory: allocator for the bytes of the packed matrix.

    Returns:
        The packed matrix; None if a number in `weight` is infinite, NaN or too large for the format.
    """
    weight = (weight if weight.dtype in TYPES else weight.float()).contiguous()
    outputs, columns = weight.shape
    levels = 1 if form.stretch is None else 2
    number = library.formats[form.bits, levels, form.minimum, form.zero, form.group_size, False, torch.float16]
    data = memory.take(library.packed_bytes(number, outputs, columns))
    faults = torch.zeros(-(-outputs // LANES), dtype=torch.uint8)
    size = {"outputs": outputs, "columns": columns, "number": number}
    source = TYPES[weight.dtype]
    library.call("quantize_weights", weights=weight, matrix=data, faults=faults, source=source, **size)
    return None if faults.any() else PackedMatrix(data, outputs, columns, number)


def _format(library: KernelLibrary, weight: Weight) -> tuple[Form | None, int | None]:
    """Return the kernel format of a weight, and its number in the C code; (None, None) for packing as bfloat16."""
    form = _form(library, weight) if isinstance(weight, GroupwiseTensor) else None
    return form, None if form is None else library.formats[form]


def _form(library: KernelLibrary, weight: GroupwiseTensor) -> Form | None:
    """Return the kernel format of a quantized matrix; None if no kernel supports the matrix.

    A kernel format includes the dtype in which kernels read the units of the scales (see `GroupScale`). If possible,
    the function selects a dtype that represents all units exactly. Units on torch's meta device have no values, so they
    fit every dtype.
    """
    scale, minimum, table = weight.scale, weight.minimum, weight.table is not None
    levels = 1 if scale.codes is None else 2
    if minimum is not None and (minimum.codes is None) != (scale.codes is None):
        return None
    if levels == 2:
        signed = table or weight.group_size < GROUP
        if scale.unit.shape[-1] * _STRETCH != weight.shape[1] or not _is_read_as(scale, signed):
            return None
        if minimum is not None and (minimum.unit.shape != scale.unit.shape or not _is_read_as(minimum, False)):
            return None
    units = [scales.unit for scales in (scale, minimum) if scales is not None]
    for exactly in (True, False):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):  # in this order: powers of two fit several dtypes
            form = (weight.bits, levels, minimum is not None, weight.zero, weight.group_size, table, dtype)
            if form in library.formats and all(_holds(dtype, unit, exactly) for unit in units):
                return form
    return None


def _is_read_as(scale: GroupScale, signed: bool) -> bool:
    """Return whether a kernel reads the 8-bit codes of `scale` with their correct values.

    Args:
        signed: whether the kernel reads the codes as signed numbers. Codes up to 127 have the same value either way.
    """
    assert scale.codes is not None
    right = torch.int8 if signed else torch.uint8
    return scale.codes.dtype == right or scale.codes.is_meta or bool((scale.codes.view(torch.int8) >= 0).all())


def _holds(dtype: torch.dtype, unit: Tensor, exactly: bool) -> bool:
    """Return whether `dtype` can represent all numbers in `unit`.

    Args:
        exactly: True to require the exact numbers; False to accept rounding to the precision of `dtype`.
    """
    tolerance = 0 if exactly else torch.finfo(dtype).eps / 2
    if unit.dtype == dtype or unit.is_meta:
        return True
    return torch.allclose(unit.to(dtype).float(), unit.float(), rtol=tolerance, atol=0)


def _unit_and_codes(scale: GroupScale | None, unit: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scale is None else (scale.unit.to(unit), scale.codes)
