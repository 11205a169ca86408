"""Builds the memory request of a model from its memory estimate and the engine's options."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from helexa.neuron.engine.ipc.messages import EngineOptions, MemoryRequest
from helexa.neuron.engine.loading.memory_estimate import MemoryEstimate
from helexa.neuron.hardware.host_memory import host_memory, own_bytes
from helexa.neuron.ops.constants import MAX_DRAFTS, PAGE_SIZE, SEGMENT_POSITIONS, SPLIT_ROWS
from helexa.neuron.ops.protocol import Ops

if TYPE_CHECKING:
    from helexa.core.fleet import DeviceHealth

_RUNTIME = 20 << 20  # bytes for threads, captured graphs, Python objects and partly used memory pages
_CONTEXTS = 4  # full contexts in the cache of a CPU engine, if memory suffices
_SHARE, _CUDA_SHARE = 0.25, 0.8  # of the memory after weights and states; other programs share a CPU's memory
_MOST_PAGES = 1 << 30
_SNAPSHOT_PART = 8  # divisor of free memory for the snapshots' share
_MOST_SNAPSHOTS = 4096
_SAMPLING = 6  # temporary arrays of the logits' size during sampling


def memory_request(estimate: MemoryEstimate, options: EngineOptions, ops: Ops) -> MemoryRequest:
    """Return the request for the memory of a model.

    If the options set the size of the KV cache, the request is for this size. Otherwise a CPU engine requests pages for
    four sequences of full context length, and a GPU engine requests as many pages as fit into the free memory. If the
    options set no size, `MemoryRequest.share` limits the KV cache to a fraction of the memory.
    """
    free, limit = free_memory(ops.device, options), options.memory_limit_mb * 2**20
    available = usable_memory(ops.device, options)
    context = min(options.context_length or estimate.context, estimate.context)
    cuda = ops.device.type == "cuda"
    if not estimate.page:  # a stage of a pipeline that has only recurrent layers
        pages, share = _MOST_PAGES, 1.0
    elif options.kv_cache_mb:
        pages, share = options.kv_cache_mb * 2**20 // estimate.page, 1.0
    elif cuda:
        pages, share = available // estimate.page, _CUDA_SHARE
    else:
        pages, share = _CONTEXTS * -(-context // PAGE_SIZE), _SHARE
    snapshots = 0
    if estimate.state and options.prefix_reuse != "off":
        snapshots = min((options.snapshot_mb * 2**20 or available // _SNAPSHOT_PART) // estimate.state, _MOST_SNAPSHOTS)
    rows = max(options.max_step_tokens, options.max_sequences)
    page_step, position_step = _attention(estimate, ops, rows)
    return MemoryRequest(
        device=str(ops.device),
        free=free,
        limit=limit,
        held=own_bytes(os.getpid()) or 0,
        weights=estimate.weights,
        loading=estimate.loading,
        step=_step(estimate, options, ops, rows),
        page_step=page_step,
        position_step=position_step,
        page=estimate.page,
        page_size=PAGE_SIZE,
        pages=max(pages, 1),
        share=share,
        context=context,
        state=estimate.state,
        sequences=options.max_sequences,
        snapshots=snapshots,
        devices=options.devices,
    )


def of_all_ranks(estimate: MemoryEstimate, ranks: int) -> MemoryEstimate:
    """Return the memory of all ranks of a model, from the estimate of rank 0, which has the largest part."""
    return replace(
        estimate,
        weights=estimate.weights * ranks,
        loading=estimate.loading * ranks,
        page=estimate.page * ranks,
        state=estimate.state * ranks,
        hidden=estimate.hidden * ranks,
        widest=estimate.widest * ranks,
        vocab_size=estimate.vocab_size * ranks,
    )


def free_memory(device: torch.device, options: EngineOptions) -> int:
    """Return the free memory of a device in bytes. If the ranks run on several devices, return the least of them."""
    if device.type != "cuda":
        return host_memory()[0]
    from helexa.neuron.hardware.accelerators import device_health  # imports pydantic, which CPU engines do not need

    return least_free(torch.cuda.mem_get_info(device)[0], options.devices, device_health() if options.devices else [])


def least_free(own: int, devices: Sequence[str], readings: "Sequence[DeviceHealth]") -> int:
    """Return the least free memory of this process's device and of `devices`, in bytes.

    Args:
        own: free memory of this process's device.
        readings: memory use of the devices that respond. The driver is asked instead of torch, because torch would take
            memory on each device.
    """
    others = (reading.vram_free_mb << 20 for reading in readings if f"cuda:{reading.index}" in devices)
    return min([own, *others])


def usable_memory(device: torch.device, options: EngineOptions) -> int:
    """Return the free memory of a device in bytes (see `free_memory`), at most the limit in the options."""
    free = free_memory(device, options)
    return min(free, options.memory_limit_mb * 2**20 or free)


def _step(estimate: MemoryEstimate, options: EngineOptions, ops: Ops, rows: int) -> int:
    """Return the bytes that the largest step allocates, except memory that grows with the tokens in the KV cache."""
    partials = ops.partials_bytes(options.max_sequences, estimate.heads, estimate.kv_heads, estimate.head_dim)
    return (
        _RUNTIME + rows * 4 * (3 * estimate.widest + 6 * estimate.hidden) + _logits(estimate, options, ops) + partials
    )


def _logits(estimate: MemoryEstimate, options: EngineOptions, ops: Ops) -> int:
    """Return the bytes of the largest step's logits and of the temporary arrays of sampling."""
    drafting = min(options.speculation_max_sequences, options.max_sequences) if options.speculation else 0
    rows = (1 + _SAMPLING) * max(options.max_sequences, drafting * (1 + MAX_DRAFTS))
    if ops.quantised:
        rows += options.max_sequences  # the workspace rounds sizes up to powers of two
    return rows * estimate.vocab_size * 4


def _attention(estimate: MemoryEstimate, ops: Ops, rows: int) -> tuple[int, int]:
    """Return the bytes that attention allocates in a step, in two parts.

    Returns:
        The bytes per KV page in use, and the bytes per position of one sequence.
    """
    if not ops.gathers:
        return 0, -(-SPLIT_ROWS * estimate.heads * (estimate.head_dim + 2) * 4 // SEGMENT_POSITIONS)
    # Plain torch copies the pages of one layer with padding, repeats K and V for each query head, and allocates scores
    # and a mask.
    gathered = 2 * estimate.page // max(estimate.layers, 1) + 12 * estimate.heads * PAGE_SIZE
    repeated = 2 * (estimate.heads + estimate.kv_heads) * estimate.head_dim * ops.dtype.itemsize
    return gathered, repeated + rows * (5 + 12 * estimate.sinks)
