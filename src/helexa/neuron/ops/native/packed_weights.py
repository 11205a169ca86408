"""Weights in the layout of `kernels/tiles.h` and `kernels/plain.c`."""

import mmap
from dataclasses import dataclass

import numpy as np

from helexa.neuron import tensors
from helexa.neuron.ops.kernel_header import GROUP, LANES, STRETCH_GROUPS
from helexa.neuron.ops.native.kernel_library import Format, KernelLibrary, type_codes
from helexa.neuron.processes.heaps_and_shared_memory import prefer_page_size
from helexa.neuron.tensors import DType, Tensor
from helexa.neuron.weights.quantization_formats import QuantFormat
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor, Weight

_STRETCH = STRETCH_GROUPS * GROUP


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix [outputs, columns] in tile layout (see `kernels/tiles.h`)."""

    data: Tensor  # uint8, the bytes of all tiles
    outputs: int  # number of rows
    columns: int
    number: int | None  # number of the quantization format in the C code; None for bfloat16

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tiles."""
        return self.data.nbytes


class HugeMemory:
    """Allocator for weight memory, in huge pages if the system supports them."""

    def __init__(self, chunk: int = 64 << 20) -> None:
        self._chunk = chunk  # bytes per allocation from the operating system
        self._free = tensors.empty(0, dtype=tensors.uint8)

    def take(self, size: int) -> Tensor:
        """Return zeroed memory, uint8 [size], aligned to 64 bytes."""
        if len(self._free) < size:
            memory = mmap.mmap(-1, max(size, self._chunk), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Each step reads all weights, which is faster in huge pages. In a mapped file, which has pages of 4 KiB,
            # decoding took 1 to 5 % longer.
            prefer_page_size(memory, huge=True)
            self._free = tensors.frombuffer(memory, dtype=tensors.uint8)
        result, self._free = self._free[:size], self._free[-(-size // 64) * 64 :]
        return result


def pack(library: KernelLibrary, weight: Weight, memory: HugeMemory) -> PackedMatrix:
    """Return a weight [rows, K] in tile layout. K must be a multiple of 16.

    Plain weights, and quantized weights in a format that no kernel supports, become bfloat16.
    """
    outputs, columns = weight.shape
    kernel_format, number = _numbered(library, weight)
    data = memory.take(library.packed_bytes(number, outputs, columns))
    size = {"matrix": data, "outputs": outputs, "columns": columns}
    if isinstance(weight, GroupwiseTensor) and kernel_format is not None:
        unit, scale = _unit_and_codes(weight.scale, kernel_format.unit)
        minimum_unit, minimum = _unit_and_codes(weight.minimum, kernel_format.unit)
        table = None if weight.table is None else (weight.table.int() + 128).byte()
        places = None if weight.codebook is None else _places(weight.codebook)
        parts = {"unit": unit, "scale": scale, "minimum_unit": minimum_unit, "minimum": minimum, "table": table}
        parts |= {"codebook": weight.codebook, "places": places}
        parts = {name: None if tensor is None else tensor.contiguous() for name, tensor in parts.items()}
        library.call("pack", codes=weight.codes.contiguous(), **parts, **size, number=number)
    else:
        # A quantized weight whose format no kernel supports becomes bfloat16.
        plain = weight.dequantize(tensors.bfloat16) if isinstance(weight, GroupwiseTensor) else weight.bfloat16()
        library.call("pack_plain", weights=plain.contiguous(), **size)
    return PackedMatrix(data, outputs, columns, number)


def packed_bytes(library: KernelLibrary, weight: Weight) -> int:
    """Return the bytes of the matrix from `pack`; `weight` may be on the meta device."""
    return library.packed_bytes(_numbered(library, weight)[1], *weight.shape)


def quantize(
    library: KernelLibrary, weight: Tensor, quant_format: QuantFormat, memory: HugeMemory
) -> PackedMatrix | None:
    """Quantize a plain weight [rows, K] to `quant_format`; return it in tile layout.

    `quant_format.fits(K)` must be True. The result is None if a number in `weight` is infinite, NaN or too large for
    the format.
    """
    codes = type_codes()
    weight = (weight if weight.dtype in codes else weight.float()).contiguous()
    outputs, columns = weight.shape
    levels = 1 if quant_format.stretch is None else 2
    wanted = Format(
        bits=quant_format.bits,
        levels=levels,
        minimum=quant_format.minimum,
        zero=quant_format.zero,
        group=quant_format.group_size,
        table=False,
        entries=0,
        width=0,
        unit=tensors.float16,
    )
    number = library.formats[wanted]
    data = memory.take(library.packed_bytes(number, outputs, columns))
    faults = tensors.zeros(-(-outputs // LANES), dtype=tensors.uint8)
    size = {"outputs": outputs, "columns": columns, "number": number}
    source = codes[weight.dtype]
    library.call("quantize_weights", weights=weight, matrix=data, faults=faults, source=source, **size)
    return None if faults.any() else PackedMatrix(data, outputs, columns, number)


def _numbered(library: KernelLibrary, weight: Weight) -> tuple[Format | None, int | None]:
    """Return a weight's kernel format, and the number of this format in the C code.

    The result is (None, None) if the packed matrix is bfloat16: for a plain weight or an unsupported format.
    """
    kernel_format = _format(library, weight) if isinstance(weight, GroupwiseTensor) else None
    return kernel_format, None if kernel_format is None else library.formats[kernel_format]


def _format(library: KernelLibrary, weight: GroupwiseTensor) -> Format | None:
    """Return the kernel format of a quantized matrix; None if no kernel supports it."""
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
    entries, width = (0, 0) if weight.codebook is None else weight.codebook.shape
    # A kernel format includes the dtype of the units of the scales (see `GroupScale`). A dtype that represents all
    # units exactly is best. Units on torch's meta device have no values, so they fit every dtype.
    for exactly in (True, False):
        # bfloat16 first: it represents all units that are powers of two, but float16 only some of them. All matrices
        # with units that are powers of two thus get the same kernel format.
        for dtype in (tensors.bfloat16, tensors.float16, tensors.float32):
            kernel_format = Format(
                weight.bits,
                levels,
                minimum is not None,
                weight.zero,
                weight.group_size,
                table,
                entries,
                width,
                dtype,
            )
            if kernel_format in library.formats and all(_holds(dtype, unit, exactly) for unit in units):
                return kernel_format
    return None


def _is_read_as(scale: GroupScale, signed: bool) -> bool:
    """Return whether 8-bit codes keep their values in a kernel.

    The kernel reads the codes as signed numbers if `signed`, else as unsigned numbers.
    """
    assert scale.codes is not None
    right = tensors.int8 if signed else tensors.uint8
    # Codes up to 127 have the same value as signed and as unsigned numbers.
    return scale.codes.dtype == right or scale.codes.is_meta or bool((scale.codes.view(tensors.int8) >= 0).all())


def _holds(dtype: DType, unit: Tensor, exactly: bool) -> bool:
    """Return whether `dtype` can represent `unit`, with rounding unless `exactly`."""
    tolerance = 0 if exactly else tensors.finfo(dtype).eps / 2
    if unit.dtype == dtype or unit.is_meta:
        return True
    return tensors.allclose(unit.to(dtype).float(), unit.float(), rtol=tolerance, atol=0)


def _places(codebook: Tensor) -> Tensor:
    """Return a table of the entries of `codebook`, int32 [base ** width].

    The codes of an entry, as the digits of a number with the lowest digit first, are the entry's place in the table.
    The table contains the index of the entry in `codebook`. Places without an entry contain 0.
    """
    entries, width = codebook.shape
    # Entries of eight codes have codes from 0 to 2, and entries of four codes have codes from 0 to 7.
    base = 3 if width == 8 else 8
    places = np.zeros(base**width, np.int32)
    places[codebook.numpy().astype(np.int64) @ base ** np.arange(width)] = np.arange(entries)
    return tensors.from_numpy(places)


def _unit_and_codes(scale: GroupScale | None, unit: DType) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scale is None else (scale.unit.to(unit), scale.codes)
