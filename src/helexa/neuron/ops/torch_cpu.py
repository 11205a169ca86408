"""CPU kernels of the stock torch wheel: int4 products for few rows, prepacked oneDNN bfloat16 for many."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.linear import GatedLinear, LinearOp, ProductBytes, SideBySide
from helexa.neuron.ops.norm import FewPassRmsNorm, NormOp
from helexa.neuron.ops.reference.reference import ReferenceOps, dequantizing_bytes
from helexa.neuron.weights.formats import GroupwiseTensor, Weight

# Row count up to which the int4 product beats bfloat16: it reads a quarter of the bytes but computes in float32.
_INT4_ROWS = 6


class CpuOps(ReferenceOps):
    """Plain torch with faster products and norms, for CPUs that multiply bfloat16 in hardware."""

    name = "torch-cpu-bf16"

    @staticmethod
    def available() -> bool:
        """Return whether this CPU and this torch version support the kernels."""
        return torch.cpu._is_avx512_bf16_supported() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def linear(self, matrices: Sequence[Weight], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Prepare a product; 4-bit weights are packed both as int4 and as bfloat16."""
        bias = None if bias is None else bias.to(self.dtype)
        dense = torch.cat([self.dense(matrix) for matrix in matrices]) if len(matrices) > 1 else self.dense(matrices[0])
        self.step_bytes += dense.nbytes
        many = PrepackedLinear(dense, bias)
        packed = [
            Int4Linear(matrix) for matrix in matrices if isinstance(matrix, GroupwiseTensor) and Int4Linear.fits(matrix)
        ]
        product = ByRows(SideBySide(packed, bias), many) if len(packed) == len(matrices) else many
        return GatedLinear(lambda x: self.gate_mul(x, gate), product) if gate else product

    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the size in bytes of the weights packed as bfloat16, plus packed as int4 if `Int4Linear.fits`."""
        dense = sum(self.dense_bytes(weight) for weight in weights)
        int4 = [weight for weight in weights if isinstance(weight, GroupwiseTensor) and Int4Linear.fits(weight)]
        packed = sum(map(Int4Linear.packed_bytes, int4)) if len(int4) == len(weights) else 0
        return ProductBytes(dense + packed, dense + dequantizing_bytes(weights))

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Prepare the norm with few passes, since each pass over a small tensor has a fixed cost."""
        return FewPassRmsNorm(weight, eps, self.dtype)


class ByRows:
    """Product that selects one of two implementations by the number of rows."""

    def __init__(self, few: LinearOp, many: LinearOp) -> None:
        self._few = few
        self._many = many

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return self._few(x) if x.shape[0] <= _INT4_ROWS else self._many(x)


class PrepackedLinear:
    """A bfloat16 product with its weight in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return self._run(x, self._weight, self._bias, "none", [], "")


class Int4Linear:
    """A product of 4-bit codes with a bfloat16 scale and offset per group."""

    def __init__(self, weight: GroupwiseTensor) -> None:
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        # torch dequantizes as (q - 8) * scale + zero.
        scale = weight.scale.values()
        zeros = (8 - weight.zero) * scale + (0 if weight.minimum is None else weight.minimum.values())
        self._scales_and_zeros = torch.stack([scale, zeros], dim=-1).transpose(0, 1).bfloat16().contiguous()
        self._group_size = weight.group_size
        self._run = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @staticmethod
    def fits(weight: GroupwiseTensor) -> bool:
        """Return whether torch's kernel supports this shape and group size."""
        rows, columns = weight.shape
        plain = weight.bits == 4 and weight.table is None
        return plain and weight.group_size in (32, 64, 128, 256) and rows % 16 == 0 and columns % 2 == 0

    @staticmethod
    def packed_bytes(weight: GroupwiseTensor) -> int:
        """Return the bytes of the packing: 4-bit codes, and a 16-bit scale and offset per group."""
        return weight.codes.numel() // 2 + weight.codes.numel() // weight.group_size * 4

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return self._run(x, self._codes, self._group_size, self._scales_and_zeros)
