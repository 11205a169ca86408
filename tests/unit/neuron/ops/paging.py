"""Batches over a paged KV cache. Kernels fill the cache; plain torch reads it back."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence as EngineSequence
from helexa.neuron.engine.step_input_and_graph_sizes import StepBuffers, StepInput, int32
from helexa.neuron.ops.batch import AttentionKind, Batch, Capacity, Span
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.native.native_ops import NativeOps
from neuron.ops import float64

CPU = torch.device("cpu")


def entry(number: int, computed: int, count: int, pages: list[int]) -> PlanEntry:
    """A plan entry for a sequence in `pages` that computes its last `count` tokens. Each token id equals `number`."""
    prompt = [number] * (computed + count)
    sequence = EngineSequence(Generate(id=number, prompt=prompt, max_tokens=1, sampling=SamplingParams()))
    sequence.computed, sequence.pages = computed, pages
    return PlanEntry(sequence, count)


def batch_of(plan: list[PlanEntry], capacity: Capacity) -> Batch:
    return StepBuffers(capacity, CPU, packed=False).load(build_step(plan))


def batch_of_spans(
    spans: Sequence[Span], pages: Sequence[list[int]] | None = None, device: torch.device = CPU
) -> Batch:
    """A batch with only the location of its spans and pages filled in. Spans of one row come first."""
    rows, lists = spans[-1].stop, pages or [[0]] * len(spans)
    width = max(map(len, lists))
    none = np.zeros(rows, np.int32)
    step = StepInput(
        tokens=none,
        positions=none,
        slots=none,
        sample_rows=none[:0],
        starts=int32([0, *(span.stop for span in spans)]),
        prefixes=int32([span.prefix for span in spans]),
        settled=int32([span.settled for span in spans]),
        state_slots=int32([span.slot for span in spans]),
        pages=int32([row + [0] * (width - len(row)) for row in lists]),
    )
    return StepBuffers(Capacity(rows, len(spans), width), device, packed=True).load(step)


def store(ops: NativeOps, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store keys and values [L, kv_heads, D] in the cache without rotation."""
    rows, _, dim = keys.shape
    no_rotation = torch.ones(rows, dim // 2), torch.zeros(rows, dim // 2)
    ops.rotate_store(torch.cat((keys, values), 1).float().contiguous(), 0, no_rotation, cache, slots)


def slots_of(pages: list[int], length: int) -> Tensor:
    """Return the slots of the first `length` positions of a sequence, int32."""
    slots = [pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(length)]
    return torch.tensor(slots, dtype=torch.int32)


def transformed(x: Tensor) -> Tensor:
    """Return the Hadamard transform of blocks of the last dimension, as kernels apply it to heads of an 8-bit cache.

    The block size is the largest power of two that divides the dimension.
    """
    block = x.shape[-1] & -x.shape[-1]
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.reshape(*x.shape[:-1], -1, block) @ matrix).view(x.shape)


def queries_for(queries: Tensor, bits: int) -> Tensor:
    """Return queries [.., D] as `rotate_store` returns them for a cache of `bits` bits."""
    if bits == 16:
        return queries.bfloat16()
    return transformed(queries.bfloat16().float()) / (queries.shape[-1] & -queries.shape[-1])


def rounded_queries(queries: Tensor) -> Tensor:
    """Return queries [.., D] of an 8-bit cache as attention rounds them for products with differences of keys."""
    unit = queries.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (queries / unit).round() * unit


def unlaid(cache: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return K and V as attention reads them, float32 [slots, kv_heads, D], from a cache [pages, kv_heads, bytes]."""
    if bits == 8:
        base, differences, values = unlaid_bytes(cache, dim)
        return transformed(base + differences) / (dim & -dim), values
    pages, kv_heads, _ = cache.shape
    keys, values = cache.reshape(-1).view(torch.bfloat16).float().view(pages, kv_heads, 2, -1).unbind(2)
    keys = keys.view(pages, kv_heads, dim // 2, PAGE_SIZE, 2).permute(0, 3, 1, 2, 4)
    values = values.view(pages, kv_heads, PAGE_SIZE // 2, dim, 2).permute(0, 2, 4, 1, 3)
    keys, values = (x.reshape(pages * PAGE_SIZE, kv_heads, dim) for x in (keys, values))
    return keys, values


def unlaid_bytes(cache: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bases of keys, the differences of keys from them, and V, of an 8-bit cache [pages, kv_heads, bytes].

    Each result is float32 [slots, kv_heads, D]. Bases and differences are Hadamard transformed.
    """
    (pages, kv_heads, _), numbers = cache.shape, PAGE_SIZE * dim
    shape = (pages * PAGE_SIZE, kv_heads, dim)
    codes = cache[..., :numbers].view(pages, kv_heads, dim // 4, PAGE_SIZE, 4).permute(0, 3, 1, 2, 4).reshape(shape)
    values = cache[..., numbers : 2 * numbers].contiguous().view(torch.int8)
    values = values.view(pages, kv_heads, PAGE_SIZE // 4, dim, 4).permute(0, 2, 4, 1, 3).reshape(shape)
    scales = cache[..., 2 * numbers : -2 * dim].contiguous().view(torch.float32).view(pages, kv_heads, 3, PAGE_SIZE)
    key_scales, value_logarithms, _ = scales.permute(2, 0, 3, 1).reshape(3, pages * PAGE_SIZE, kv_heads, 1)
    base = cache[..., -2 * dim :].contiguous().view(torch.bfloat16).float().repeat_interleave(PAGE_SIZE, 0)
    return base, (codes.float() - 128) * key_scales, values.float() * value_logarithms.exp2()


def attention(
    query: Tensor, cache: Tensor, slots: Tensor, bits: int, kind: AttentionKind | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention of a query [heads, D] at the last of `slots`, as `float64.attention` does.

    The query of an 8-bit cache is rounded as attention rounds it, but the weights are exact.
    """
    dim, kind = query.shape[-1], kind or AttentionKind(query.shape[-1] ** -0.5)
    if bits == 16:
        keys, values = (x[slots] for x in unlaid(cache, dim, 16))
        return float64.attention(query.bfloat16(), keys, values, kind)
    exact = queries_for(query, 8)
    base, differences, values = (x[slots] for x in unlaid_bytes(cache, dim))
    both = torch.cat((exact, rounded_queries(exact)), -1)
    return float64.attention(both, torch.cat((base, differences), -1), values, kind)
