"""CPU kernels compiled on first use, around the same matrix products as `CpuOps`."""

import ctypes

import torch
from torch import Tensor

from helexa.neuron.engine.batch import DecodeGroup
from helexa.neuron.ops.cpu import CpuOps
from helexa.neuron.ops.norm import NormOp

_LANES = 16
_MAX_DIM = 256
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "add_rms_norm": (_POINTER, _POINTER, _POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_float),
    "silu_mul": (_POINTER, _POINTER, _COUNT, _COUNT),
    "rotate_store": (*(_POINTER,) * 5, *(_COUNT,) * 5),
    "attend_decode": (*(_POINTER,) * 5, *(_COUNT,) * 8),
}


class NativeOps(CpuOps):
    """Normalisation, rotation, activation and decode attention in one pass each.

    Shapes that the kernels do not take (widths that are no multiple of 16) go the way of `CpuOps`.
    """

    name = "native"

    def __init__(self, device: torch.device, dtype: torch.dtype, library: ctypes.CDLL) -> None:
        super().__init__(device, dtype)
        self._library = library
        for name, signature in _SIGNATURES.items():
            getattr(library, name).argtypes = signature

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """One pass to add and measure, one to scale."""
        return NativeRmsNorm(self._library, super().rms_norm(weight, eps), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for [T, 2 * I], gate first."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % _LANES or not gate_up.is_contiguous():
            return super().silu_mul(gate_up)
        out = gate_up.new_empty(rows, width)
        self._library.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def rotate_store(self, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """Rotates the queries in place and the keys on their way into the cache."""
        _, kv_heads, total, dim = cache.shape
        if dim % (2 * _LANES) or not qkv.is_contiguous():
            return super().rotate_store(qkv, heads, cos, sin, cache, slots)
        self._library.rotate_store(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), cache.data_ptr(), slots.data_ptr(),
            qkv.shape[0], heads, kv_heads, dim, total,
        )  # fmt: skip
        return qkv[:, :heads]

    def _decode(self, queries: Tensor, cache: Tensor, page_size: int, group: DecodeGroup) -> Tensor:
        rows, heads, dim = queries.shape
        _, kv_heads, total, _ = cache.shape
        if dim % _LANES or dim > _MAX_DIM or queries.stride()[1:] != (dim, 1):
            return super()._decode(queries, cache, page_size, group)
        out = queries.new_empty(rows, heads, dim)
        failed = self._library.attend_decode(
            queries.data_ptr(), cache.data_ptr(), group.pages.data_ptr(), group.lengths.data_ptr(), out.data_ptr(),
            rows, queries.stride(0), heads, kv_heads, dim, total, group.pages.shape[1], page_size,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the partial sums of attention")
        return out


class NativeRmsNorm:
    """`add_rms_norm` of `kernels.c` for rows in one piece; `otherwise` for the rest."""

    def __init__(self, library: ctypes.CDLL, otherwise: NormOp, weight: Tensor, eps: float) -> None:
        self._run = library.add_rms_norm
        self._otherwise = otherwise
        self._weight = weight.contiguous()
        self._width = weight.shape[-1]
        self._eps = eps

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """As every `NormOp`; the kernel takes float32 rows and a bfloat16 delta."""
        if x.dtype != torch.float32 or self._width % _LANES or not x.is_contiguous():
            return self._otherwise(x, delta)
        added = None if delta is None else delta.contiguous().data_ptr()
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        weight = self._weight.data_ptr()
        self._run(x.data_ptr(), added, weight, out.data_ptr(), x.numel() // self._width, self._width, self._eps)
        return out
