"""Read fp8 and MXFP4 tensors of safetensors checkpoints.

The scales of a quantized tensor are a separate tensor. An fp8 tensor is dequantized to float32 when it is read. An
MXFP4 tensor stays quantized, with the codes and scales of the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.model_file import WHOLE, Part, block_numbers
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor, Weight
from helexa.neuron.weights.safetensors_shards import FileTensor

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_SCALES = ("_scale_inv", "_scale")
_DEFAULT_BLOCK_SIZE = [128, 128]
_MAX_BLOCK_SIZE = 1 << 20
# Numbers that share a scale, from the specification of the MX formats (Open Compute Project, 2023).
_MXFP4_GROUP = 32
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # value of each code, in units of 1/2


class StoredTensor(Protocol):
    """A tensor of a checkpoint with its fp8 or MXFP4 scales, read on demand."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the complete tensor that `read()` returns."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the tensor and its scales in the file, in bytes."""
        ...

    @property
    def column_block(self) -> int:
        """Number of adjacent columns that must be read together."""
        ...

    def read(self, index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return the tensor, one matrix of a stack (`index`), or a part of it.

        Raises:
            ModelFileError: the tensor has no matrix at `index`, or the file cannot be read.
        """
        ...

    def on_meta(self, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` on the meta device, in the format of `read`."""
        ...


@dataclass(frozen=True)
class Fp8Tensor:
    """A tensor in fp8 with one scale per tensor, per row, or per 2-D block.

    Reference: transformers `integrations/finegrained_fp8.py`.
    """

    weight: FileTensor
    scale: FileTensor
    # Number of rows and number of columns of a block. Not used if there is one scale per tensor or per row.
    block_size: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.weight.shape[-2:]
        blocks = (-(-rows // self.block_size[0]), -(-columns // self.block_size[1]))
        stack = self.weight.shape[:-2]
        if self.scale.shape not in ((), (1,), (rows,), *((*stack, *grid) for grid in ((1, 1), (rows, 1), blocks))):
            raise ModelFileError(
                f"{self.scale.file.path.name}: tensor {self.scale.name} has the shape {list(self.scale.shape)}, which "
                f"does not fit weights of shape {list(self.weight.shape)} in blocks of {list(self.block_size)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized tensor."""
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        """Size of the fp8 values and scales in the file, in bytes."""
        return self.weight.nbytes + self.scale.nbytes

    @property
    def column_block(self) -> int:
        """1, because a dequantized tensor has no blocks."""
        return 1

    def read(self, index: int | None = None, part: Part = WHOLE) -> Tensor:
        """Return the tensor, or a part of it, dequantized to float32."""
        # The weight is always multiplied by the scale, even if the name of the scale tensor ends in `_inv` (inverse).
        weight = self.weight.read(index, part).float()
        scale = self.scale.read(index if len(self.scale.shape) > 2 else None)
        # A scale in uint8 is an exponent of 2 with a bias of 127.
        scale = (scale.float() - 127).exp2() if scale.dtype == tensors.uint8 else scale.float()
        if scale.numel() == 1:
            return weight.mul_(scale)
        if scale.dim() == 1:
            scale = scale[:, None]
        rows, columns = (
            np.arange(size) if chosen is None else chosen
            for size, chosen in zip(self.shape[-2:], (part.rows, part.columns), strict=True)
        )
        if scale.shape[-2:] == (self.shape[-2], 1):
            return weight.mul_(scale[..., rows, :])
        height, width = self.block_size
        by_rows, blocks = scale[..., rows // height, :], columns // width
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        # Multiply one block of columns at a time: the scales of all columns would need an array as large as the matrix.
        for start, stop in pairwise((*starts, len(blocks))):
            weight[..., start:stop].mul_(by_rows[..., blocks[start], None])
        return weight

    def on_meta(self, shape: tuple[int, ...]) -> Tensor:
        """Return a float32 tensor of `shape` on torch's meta device."""
        return tensors.empty(shape, dtype=tensors.float32, device="meta")


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A matrix, or a stack of matrices, in MXFP4: 32 adjacent columns share a scale.

    References: OCP Microscaling Formats 1.0; transformers `integrations/mxfp4.py`.
    """

    blocks: FileTensor  # the codes, uint8 [rows, groups, 16], or [matrices, rows, groups, 16] for a stack of matrices
    scales: FileTensor  # the exponents, uint8 [rows, groups] or [matrices, rows, groups]

    def __post_init__(self) -> None:
        valid = self.blocks.shape == (*self.scales.shape, _MXFP4_GROUP // 2) and len(self.scales.shape) in (2, 3)
        if not valid or {self.blocks.dtype_name, self.scales.dtype_name} != {"uint8"}:
            raise ModelFileError(
                f"{self.blocks.file.path.name}: tensors {self.blocks.name} and {self.scales.name} with shapes "
                f"{list(self.blocks.shape)} and {list(self.scales.shape)} are not blocks of MXFP4 and their scales"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized tensor."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * _MXFP4_GROUP)

    @property
    def nbytes(self) -> int:
        """Size of the codes and scales in the file, in bytes."""
        return self.blocks.nbytes + self.scales.nbytes

    @property
    def column_block(self) -> int:
        """Number of columns that share a scale."""
        return _MXFP4_GROUP

    def read(self, index: int | None = None, part: Part = WHOLE) -> GroupwiseTensor:
        """Return one matrix, or a part of it, with the codes of the file.

        Raises:
            ModelFileError: `index` is missing for a stack of matrices or given for a single matrix, or the file cannot
                be read.
            ValueError: the columns of the part are not whole groups of 32.
        """
        if (index is None) != (len(self.shape) == 2):
            raise ModelFileError(
                f"{self.blocks.file.path.name}: tensor {self.blocks.name} of shape {list(self.shape)} must be read one "
                "matrix at a time"
            )
        rows = Part(part.rows)
        packed, exponents = self.blocks.read(index, rows), self.scales.read(index, rows)
        if part.columns is not None:
            groups = block_numbers(part.columns, _MXFP4_GROUP)
            if groups is None:
                raise ValueError(
                    f"the columns to read from {self.blocks.name} are not whole groups of {_MXFP4_GROUP} columns"
                )
            packed, exponents = packed[:, groups], exponents[:, groups]
        return _mxfp4(packed, exponents)

    def on_meta(self, shape: tuple[int, ...]) -> GroupwiseTensor:
        """Return an MXFP4 matrix of `shape` on torch's meta device."""
        return _mxfp4_on_meta(shape)


def _mxfp4(packed: Tensor, exponents: Tensor) -> GroupwiseTensor:
    # A byte holds two e2m1 codes, the first code in the low bits.
    codes = tensors.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1)
    # The bias of the exponents is 127. The unit has one factor of 1/2 more, because `_E2M1` has units of 1/2.
    unit = tensors.ldexp(tensors.ones_like(exponents, dtype=tensors.float32), exponents.int() - 128)
    table = tensors.tensor(_E2M1, dtype=tensors.int8)
    return GroupwiseTensor(codes, GroupScale(unit), None, zero=0, bits=4, group_size=_MXFP4_GROUP, table=table)


@tensors.cached()
def _mxfp4_on_meta(shape: tuple[int, ...]) -> GroupwiseTensor:
    exponents = tensors.zeros(1, shape[-1] // _MXFP4_GROUP, dtype=tensors.uint8)
    return _mxfp4(exponents[..., None].expand(-1, -1, _MXFP4_GROUP // 2), exponents).on_meta(shape[0])


def stored_tensors(named: Mapping[str, FileTensor], config: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, with fp8 or MXFP4 scales.

    Args:
        named: the tensors in the checkpoint's files, by name.
        config: the model's configuration. The function removes the key `quantization_config` from this dict.

    Raises:
        ModelFileError: the quantization of the checkpoint is not supported, or a quantized tensor has no scales.
    """
    quantization = config.pop("quantization_config", None)
    if quantization is None:
        return dict(named)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "fp8":
        return _with_fp8(named, _block_size(quantization.get("weight_block_size")))
    if method == "mxfp4":
        return _with_mxfp4(named)
    raise ModelFileError(
        f"config: unsupported quant_method {str(method)[:40]!r} in 'quantization_config'; supported: fp8, mxfp4",
        advice="load the unquantized original model with a quant such as q4k, or a GGUF file of the model",
    )


def _block_size(stated: Any) -> tuple[int, int]:
    sizes = _DEFAULT_BLOCK_SIZE if stated is None else stated
    valid = isinstance(sizes, list) and all(type(size) is int and 0 < size <= _MAX_BLOCK_SIZE for size in sizes)
    if not valid or len(sizes) != 2:
        raise ModelFileError(
            f"config: 'weight_block_size' is {str(stated)[:40]!r}, expected two sizes such as {_DEFAULT_BLOCK_SIZE}"
        )
    return sizes[0], sizes[1]


def _with_fp8(named: Mapping[str, FileTensor], block_size: tuple[int, int]) -> dict[str, StoredTensor]:
    combined: dict[str, StoredTensor] = dict(named)
    for name, tensor in named.items():
        if tensor.dtype_name not in _FP8 or len(tensor.shape) not in (2, 3):
            continue
        scale = next((combined.pop(f"{name}{suffix}") for suffix in _SCALES if f"{name}{suffix}" in combined), None)
        if not isinstance(scale, FileTensor):
            raise ModelFileError(f"{tensor.file.path.name}: tensor {name} is in fp8, but {name}{_SCALES[0]} is missing")
        combined[name] = Fp8Tensor(tensor, scale, block_size)
    return combined


def _with_mxfp4(named: Mapping[str, FileTensor]) -> dict[str, StoredTensor]:
    combined: dict[str, StoredTensor] = dict(named)
    for blocks in [name for name in named if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        if f"{name}_scales" not in named or name in named:
            raise ModelFileError(
                f"{named[blocks].file.path.name}: tensor {blocks} is in MXFP4, but {name}_scales is missing or {name} "
                "exists, too"
            )
        del combined[blocks], combined[f"{name}_scales"]
        combined[name] = Mxfp4Tensor(named[blocks], named[f"{name}_scales"])
    return combined
