"""CPU kernels of torch: int4 products for few rows, oneDNN bfloat16 for many.

The engine uses these kernels if the native (C) kernels cannot be compiled or do not support the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.linear_and_norm_operators import (
    ConcatenatedLinear,
    FewPassRmsNorm,
    GatedLinear,
    LinearOp,
    NormOp,
    ProductBytes,
)
from helexa.neuron.ops.reference.reference_ops import ReferenceOps, dequantizing_bytes
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight

# Maximum number of rows for which the int4 product is faster than the bfloat16 product. The int4 product reads a
# quarter of the bytes, but computes in float32.
_INT4_ROWS = 6


class CpuOps(ReferenceOps):
    """Plain-torch kernels with faster products and norms, for CPUs with bfloat16."""

    name = "torch-cpu-bf16"

    @staticmethod
    def available() -> bool:
        """Return whether this CPU and the installed torch version support these kernels."""
        return torch.cpu._is_avx512_bf16_supported() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def linear(self, matrices: Sequence[Weight], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        bias = None if bias is None else bias.to(self.dtype)
        dense = torch.cat([self.dense(matrix) for matrix in matrices]) if len(matrices) > 1 else self.dense(matrices[0])
        self.step_bytes += dense.nbytes
        many = PrepackedLinear(dense, bias)
        packed = [
            Int4Linear(matrix) for matrix in matrices if isinstance(matrix, GroupwiseTensor) and Int4Linear.fits(matrix)
        ]
        # The weights are stored twice, as int4 for few rows and as bfloat16 for many, only if the int4 kernel supports
        # all of them.
        product = ByRows(ConcatenatedLinear(packed, bias), many) if len(packed) == len(matrices) else many
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        dense = sum(self.dense_bytes(weight) for weight in weights)
        int4 = [weight for weight in weights if isinstance(weight, GroupwiseTensor) and Int4Linear.fits(weight)]
        packed = sum(map(Int4Linear.packed_bytes, int4)) if len(int4) == len(weights) else 0
        return ProductBytes(dense + packed, dense + dequantizing_bytes(weights))

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        # On a CPU, each torch operation on the input has a fixed cost, so an operator with fewer operations is faster.
        return FewPassRmsNorm(weight, eps, self.dtype)


class ByRows:
    """Linear operator that uses `few` for at most 6 rows, and `many` for more."""

    def __init__(self, few: LinearOp, many: LinearOp) -> None:
        self._few = few
        self._many = many

    def __call__(self, x: Tensor) -> Tensor:
        """Return N outputs [T, N] for each of T rows x [T, inputs]."""
        return self._few(x) if x.shape[0] <= _INT4_ROWS else self._many(x)


class PrepackedLinear:
    """Linear operator in bfloat16, with the weight in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """Return N outputs [T, N] for each of T rows x [T, inputs]."""
        return self._run(x, self._weight, self._bias, "none", [], "")


class Int4Linear:
    """Linear operator with a 4-bit weight, without bias."""

    def __init__(self, weight: GroupwiseTensor) -> None:
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        # torch dequantizes a code as (code - 8) * scale + zero.
        scale = weight.scale.values()
        zeros = (8 - weight.zero) * scale + (0 if weight.minimum is None else weight.minimum.values())
        self._scales_and_zeros = torch.stack([scale, zeros], dim=-1).transpose(0, 1).bfloat16().contiguous()
        self._group_size = weight.group_size
        self._run = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @staticmethod
    def fits(weight: GroupwiseTensor) -> bool:
        """Return whether torch's int4 kernel supports the weight's format and shape."""
        rows, columns = weight.shape
        plain = weight.bits == 4 and weight.table is None
        return plain and weight.group_size in (32, 64, 128, 256) and rows % 16 == 0 and columns % 2 == 0

    @staticmethod
    def packed_bytes(weight: GroupwiseTensor) -> int:
        """Return the bytes of the packed weight: 4 bits per code, 32 bits per group."""
        return weight.codes.numel() // 2 + weight.codes.numel() // weight.group_size * 4

    def __call__(self, x: Tensor) -> Tensor:
        """Return N outputs [T, N] for each of T rows x [T, inputs]."""
        return self._run(x, self._codes, self._group_size, self._scales_and_zeros)
