"""Attention without a mask within frames, computed by the native kernels of the KV cache."""

from functools import lru_cache

import torch
from torch import Tensor

from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.ops.native.frame_plan import FramePlan
from helexa.neuron.ops.native.launcher import NO_WINDOW, Launcher

_PLANS = 4  # number of cached work lists; a vision tower uses one or two for an image


def attend_frames(
    launcher: Launcher, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
) -> Tensor:
    """Return the attention output, float32 [T, heads, D], in which each row attends to all rows of its frame.

    The kernels write the keys and values to temporary memory in the layout of a 16-bit KV cache.
    `Ops.attend_frames` describes the arguments.
    """
    rows, heads, dim = qkv.shape[0], qkv.shape[1] // 3, qkv.shape[2]
    plan = _plan(lengths)
    cosines, sines = rope or (torch.empty(rows, 0), torch.empty(rows, 0))
    queries = launcher.take(rows, heads, dim, dtype=torch.bfloat16)
    cache = launcher.take(plan.pages.shape[0] * heads * 4 * PAGE_SIZE * dim, dtype=torch.uint8)
    shape = {"heads": heads, "kv_heads": heads, "dim": dim, "narrow": False}
    launcher.launch(
        "rotate_store",
        qkv=qkv,
        cosines=cosines,
        sines=sines,
        queries=queries,
        cache=cache,
        slots=plan.slots,
        query_norm=None,
        key_norm=None,
        rows=rows,
        half=cosines.shape[1],
        eps=0.0,
        **shape,
    )
    out = launcher.take(rows, heads, dim)
    launcher.launch(
        "attend",
        queries=queries,
        cache=cache,
        tile_count=plan.tile_count,
        tiles=plan.tiles,
        page_numbers=plan.pages,
        partials=out,  # not used, because no tile computes partial results
        out=out,
        sinks=None,
        window=NO_WINDOW,
        scale=scale,
        **shape,
    )
    return out


@lru_cache(_PLANS)
def _plan(lengths: tuple[int, ...]) -> FramePlan:
    return FramePlan(lengths)
