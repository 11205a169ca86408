"""Rotation of heads, and attention without a mask within frames, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_frames(qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Return the attention output [T, heads, D], in which each row attends to all rows of its frame.

    `Ops.attend_frames` describes the arguments.
    """
    query, key, value = qkv.chunk(3, dim=1)
    if rope is not None:
        query, key = rotated_by(query, rope), rotated_by(key, rope)
    frames = zip(*(heads.transpose(0, 1).split(lengths, dim=1) for heads in (query, key, value)), strict=True)
    outputs = [F.scaled_dot_product_attention(*(heads[None] for heads in frame), scale=scale)[0] for frame in frames]
    return torch.cat(outputs, dim=1).transpose(0, 1).contiguous()


def rotated_by(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Return the first R numbers of each head [T, heads, D] rotated by the cos and sin tables [T, R / 2] (RoPE).

    Number i forms a pair with number i + R / 2. The rotation uses float32, and the result has the dtype of `heads`.
    """
    cos, sin = (table[:, None] for table in rope)  # [T, 1, R / 2]
    half = cos.shape[-1]
    first, second, unrotated = heads.float().split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, unrotated)
    return torch.cat(rotated, dim=-1).to(heads.dtype)
