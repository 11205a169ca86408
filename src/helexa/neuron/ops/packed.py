"""Weights in the layout of the native kernels (see `kernels/tiles.h` and `kernels/plain.c`)."""

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.kernel_library import KernelLibrary
from helexa.neuron.weights.formats import GroupScale, GroupwiseTensor, Weight
from helexa.neuron.weights.quant_form import QuantForm

# (bits, levels of scales, has minimum, zero, group size) in the order of FORMATS in tiles.h
_FORMATS = {
    (4, 1, False, 8, 32): 0,
    (4, 1, True, 0, 32): 1,
    (5, 1, False, 16, 32): 2,
    (5, 1, True, 0, 32): 3,
    (8, 1, False, 128, 32): 4,
    (4, 2, True, 0, 32): 5,
    (5, 2, True, 0, 32): 6,
    (6, 2, False, 32, 16): 7,
}
_SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # in the order of those in quantize.c
_LANES = 16
_SPAN = 256


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [outputs, columns] as tiles.

    Attributes:
        data: uint8, the tiles.
        number: of the format in products.c, or None for bfloat16.
    """

    data: Tensor
    outputs: int
    columns: int
    number: int | None


class HugeMemory:
    """Memory that is read from end to end in every step: in huge pages where the system has them, cut from chunks.

    Args:
        chunk: bytes asked of the system at once.
    """

    def __init__(self, chunk: int = 64 << 20) -> None:
        self._chunk = chunk
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], zeroed, aligned to 64 bytes."""
        if len(self._rest) < size:
            memory = mmap.mmap(-1, max(size, self._chunk), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._rest = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._rest = self._rest[:size], self._rest[-(-size // 64) * 64 :]
        return taken


def pack(library: KernelLibrary, weight: Weight, memory: HugeMemory) -> PackedMatrix:
    """Lay out a weight [N, K]; formats that no kernel knows become bfloat16. K is a multiple of 16."""
    outputs, columns = weight.shape
    number = _number(weight) if isinstance(weight, GroupwiseTensor) else None
    data = memory.take(library.packed_bytes(number, outputs, columns))
    if isinstance(weight, GroupwiseTensor) and number is not None:
        parts = (weight.codes, *_parts(weight.scale), *_parts(weight.minimum))
        parts = [None if part is None else part.contiguous() for part in parts]
        addresses = [0 if part is None else part.data_ptr() for part in parts]
        library.run(library.encode([("pack", True, (*addresses, data.data_ptr(), outputs, columns, number))]))
    else:
        plain = weight.dequantize(torch.bfloat16) if isinstance(weight, GroupwiseTensor) else weight.bfloat16()
        plain = plain.contiguous()
        library.run(library.encode([("pack_plain", True, (plain.data_ptr(), data.data_ptr(), outputs, columns))]))
    return PackedMatrix(data, outputs, columns, number)


def quantize(library: KernelLibrary, weight: Tensor, form: QuantForm, memory: HugeMemory) -> PackedMatrix | None:
    """Lay out a plain weight [N, K] in `form`, which fits K; None as in `weights.quantize.quantize`."""
    weight = (weight if weight.dtype in _SOURCES else weight.float()).contiguous()
    outputs, columns = weight.shape
    number = _FORMATS[form.bits, 1 if form.stretch is None else 2, form.minimum, form.zero, form.group_size]
    data = memory.take(library.packed_bytes(number, outputs, columns))
    faults = torch.zeros(-(-outputs // _LANES), dtype=torch.uint8)
    addresses = (weight.data_ptr(), _SOURCES[weight.dtype], data.data_ptr(), faults.data_ptr())
    library.run(library.encode([("quantize_weights", True, (*addresses, outputs, columns, number))]))
    return None if faults.any() else PackedMatrix(data, outputs, columns, number)


def _number(weight: GroupwiseTensor) -> int | None:
    levels = 1 if weight.scale.codes is None else 2
    if levels == 2 and weight.shape[1] % _SPAN:
        return None
    if levels == 2 and weight.minimum is not None and weight.minimum.codes is None:
        return None
    return _FORMATS.get((weight.bits, levels, weight.minimum is not None, weight.zero, weight.group_size))


def _parts(scale: GroupScale | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scale is None else (scale.unit, scale.codes)
