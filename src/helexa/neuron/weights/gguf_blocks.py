"""From GGUF's stored bytes to weights: plain types become tensors, block types keep their codes exactly.

A block holds 32 codes along K behind its float16 scale; each maps to `scale * code + minimum` without rounding.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.ggml_type import BLOCK_SIZES, GgmlType

_GROUP = 32

PLAIN_TYPES = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}
"""The types that become plain tensors, and their torch types."""

# codes uint8 [blocks, 32], scale and minimum float32 [blocks]
_Blocks = tuple[Tensor, Tensor, Tensor]


def _q4_0(blocks: Tensor) -> _Blocks:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Tensor) -> _Blocks:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Blocks:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Tensor) -> _Blocks:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Blocks:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ 0x80, scale, -128 * scale  # flipping the sign bit adds 128 to a signed code


_BLOCKS: dict[GgmlType, tuple[Callable[[Tensor], _Blocks], int]] = {
    GgmlType.Q4_0: (_q4_0, 4),
    GgmlType.Q4_1: (_q4_1, 4),
    GgmlType.Q5_0: (_q5_0, 8),
    GgmlType.Q5_1: (_q5_1, 8),
    GgmlType.Q8_0: (_q8_0, 8),
}

SUPPORTED_TYPES = frozenset(PLAIN_TYPES) | frozenset(_BLOCKS)
"""The types that `decode` reads."""


def decode(kind: GgmlType, stored: np.ndarray, shape: tuple[int, ...]) -> Weight:
    """The weight of `shape` in `stored`.

    Args:
        kind: one of `SUPPORTED_TYPES`.
        stored: uint8, a tensor's bytes as `GgufFile.read` gives them; plain types share this memory.
        shape: the tensor's shape; its last dimension is a whole number of blocks.
    """
    raw = torch.from_numpy(stored)
    if kind in PLAIN_TYPES:
        return raw.view(PLAIN_TYPES[kind]).view(shape)
    split, bits = _BLOCKS[kind]
    codes, scale, minimum = split(raw.view(-1, BLOCK_SIZES[kind][1]))
    groups = (*shape[:-1], shape[-1] // _GROUP)
    return GroupwiseTensor(codes.view(shape), scale.view(groups), minimum.view(groups), bits, _GROUP)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[blocks, 16] bytes -> [blocks, 32] codes: the low nibbles come first, then the high ones."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes, one bit per code from the lowest -> [blocks, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(-2)
