"""Batches over a paged KV cache. Kernels fill the cache; plain torch reads it back."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.engine.execution.step_buffers import StepBuffers
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence as EngineSequence
from helexa.neuron.engine.step.step_input import StepInput, int32
from helexa.neuron.ops.batch import Batch, Capacity, Span
from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.ops.native.native import NativeOps

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


def unlaid(cache: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return K and V as attention reads them, float32 [slots, kv_heads, D], from a cache [pages, kv_heads, bytes].

    A page holds keys [D / 2, PAGE, 2], values [PAGE / 2, D, 2] and, if `bits` is 8, a scale per key and per value.
    """
    pages, kv_heads, _ = cache.shape
    numbers = cache[..., : 2 * PAGE_SIZE * dim * bits // 8]
    numbers = numbers.reshape(-1).view(torch.int8 if bits == 8 else torch.bfloat16).float()
    keys, values = numbers.view(pages, kv_heads, 2, PAGE_SIZE * dim).unbind(2)
    keys = keys.view(pages, kv_heads, dim // 2, PAGE_SIZE, 2).permute(0, 3, 1, 2, 4)
    values = values.view(pages, kv_heads, PAGE_SIZE // 2, dim, 2).permute(0, 2, 4, 1, 3)
    keys, values = (x.reshape(pages * PAGE_SIZE, kv_heads, dim) for x in (keys, values))
    if bits == 8:
        scales = cache[..., 2 * PAGE_SIZE * dim :].reshape(-1).view(torch.float32).view(pages, kv_heads, 2, PAGE_SIZE)
        key_scales, value_scales = scales.permute(2, 0, 3, 1).reshape(2, pages * PAGE_SIZE, kv_heads, 1)
        keys, values = keys * key_scales, values * value_scales
    return keys, values
