"""Builds a model's memory request from its memory estimate and the options."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from helexa.neuron import tensors
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryRequest
from helexa.neuron.engine.loading.memory_estimate import MemoryEstimate
from helexa.neuron.engine.window_page_pool import window_pages_needed
from helexa.neuron.hardware.host_memory import host_memory, own_bytes
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import MAX_DRAFTS, PAGE_SIZE, SEGMENT_POSITIONS, SPLIT_ROWS
from helexa.neuron.tensors import Device

if TYPE_CHECKING:
    from helexa.core.node_reports import DeviceHealth

_RUNTIME = 20 << 20  # bytes for threads, captured graphs, Python objects and partly used memory pages
_CONTEXTS = 4  # number of full contexts in the KV cache of a CPU engine, if memory suffices
# Maximum part of the memory after weights, steps and states that the KV cache takes. It is smaller on CPUs, because
# other programs use the same memory.
_SHARE, _CUDA_SHARE = 0.25, 0.8
_MOST_PAGES = 1 << 30  # requested by a stage without KV pages, so that this stage does not limit the other stages
_SNAPSHOT_PART = 8  # snapshots get free memory divided by this number
_MOST_SNAPSHOTS = 4096


def memory_request(estimate: MemoryEstimate, options: EngineOptions, ops: Ops) -> MemoryRequest:
    """Return a model's memory request, from its estimate and the options."""
    free, limit = free_memory(ops.device, options), options.memory_limit_mb * 2**20
    available = usable_memory(ops.device, options)
    context = min(options.context_length or estimate.context, estimate.context)
    cuda = ops.device.type == "cuda"
    window_pages = 0
    if ops.skips_pages and 0 < estimate.window_page < estimate.page:
        window_pages = window_pages_needed(
            estimate.window, PAGE_SIZE, options.max_sequences, options.max_step_tokens, MAX_DRAFTS
        )
    if not estimate.page:  # a stage of a pipeline that has only recurrent layers
        pages, share = _MOST_PAGES, 1.0
    elif options.kv_cache_mb:
        pages, share = _pages_in(options.kv_cache_mb * 2**20, estimate, window_pages), 1.0
    # Other programs share the memory of a CPU, but seldom that of a GPU.
    elif cuda:
        pages, share = available // estimate.page, _CUDA_SHARE
    else:
        pages, share = _CONTEXTS * -(-context // PAGE_SIZE), _SHARE
    snapshots = 0
    if estimate.state and options.prefix_reuse != "off":
        snapshots = min((options.snapshot_mb * 2**20 or available // _SNAPSHOT_PART) // estimate.state, _MOST_SNAPSHOTS)
    # A decode step computes one token of each sequence, even beyond the token budget.
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
        page=estimate.page - (estimate.window_page if window_pages else 0),
        page_size=PAGE_SIZE,
        pages=max(pages, 1),
        kv_bits=ops.kv_bits,
        share=share,
        context=context,
        state=estimate.state,
        sequences=options.max_sequences,
        snapshots=snapshots,
        devices=options.devices,
        window_page=estimate.window_page if window_pages else 0,
        window_pages=window_pages,
    )


def _pages_in(size: int, estimate: MemoryEstimate, window_pages: int) -> int:
    """Return how many KV pages fit into `size` bytes."""
    pages = size // estimate.page
    if not window_pages or pages <= window_pages:
        return pages
    return (size - window_pages * estimate.window_page) // (estimate.page - estimate.window_page)


def of_all_ranks(estimate: MemoryEstimate, ranks: int) -> MemoryEstimate:
    """Return the memory of all ranks from the estimate of rank 0, the largest."""
    return replace(
        estimate,
        weights=estimate.weights * ranks,
        loading=estimate.loading * ranks,
        page=estimate.page * ranks,
        window_page=estimate.window_page * ranks,
        largest_page=estimate.largest_page * ranks,
        state=estimate.state * ranks,
        hidden=estimate.hidden * ranks,
        widest=estimate.widest * ranks,
        vocab_size=estimate.vocab_size * ranks,
    )


def free_memory(device: Device, options: EngineOptions) -> int:
    """Return the free bytes of `device`; with several GPUs, of the one with the least."""
    if device.type != "cuda":
        return host_memory()[0]
    from helexa.neuron.hardware.nvidia_gpus import device_health  # imports pydantic, which CPU engines do not need

    # The driver reports the memory of the other devices, because torch would allocate memory on a device to read it.
    return least_free(tensors.cuda.mem_get_info(device)[0], options.devices, device_health() if options.devices else [])


def least_free(own: int, devices: Sequence[str], readings: "Sequence[DeviceHealth]") -> int:
    """Return the least free bytes of this process's device (`own`) and of `devices`.

    Args:
        readings: memory use of the devices that respond.
    """
    others = (reading.vram_free_mb << 20 for reading in readings if f"cuda:{reading.index}" in devices)
    return min([own, *others])


def usable_memory(device: Device, options: EngineOptions) -> int:
    """Return the free bytes of `device`, at most those of `options.memory_limit_mb`."""
    free = free_memory(device, options)
    return min(free, options.memory_limit_mb * 2**20 or free)


def _step(estimate: MemoryEstimate, options: EngineOptions, ops: Ops, rows: int) -> int:
    """Return the bytes of the largest step, without those that `_attention` returns."""
    partials = max(ops.partials_bytes(options.max_sequences, *shape) for shape in estimate.shapes)
    return (
        _RUNTIME + rows * 4 * (3 * estimate.widest + 6 * estimate.hidden) + _logits(estimate, options, ops) + partials
    )


def _logits(estimate: MemoryEstimate, options: EngineOptions, ops: Ops) -> int:
    """Return the bytes of the largest step's logits and of sampling's arrays."""
    drafting = min(options.speculation_max_sequences, options.max_sequences) if options.speculation else 0
    rows = max(options.max_sequences, drafting * (1 + MAX_DRAFTS))
    sampling = ops.sampling_bytes(rows, estimate.vocab_size)
    if ops.quantized:
        rows += options.max_sequences  # the kernels' workspace rounds the size of the logits up to a power of two
    return rows * estimate.vocab_size * 4 + sampling


def _attention(estimate: MemoryEstimate, ops: Ops, rows: int) -> tuple[int, int]:
    """Return attention's memory: bytes per KV page in use, bytes per position."""
    if not ops.copies_pages:
        # Native kernels keep partial results of each segment of a sequence.
        partials = sum(SPLIT_ROWS * heads * (dim + 2) * 4 for heads, _, dim in estimate.shapes)
        return 0, -(-partials // SEGMENT_POSITIONS)
    # Plain torch copies the pages of one layer with padding, repeats K and V for each query head, and allocates scores
    # and a mask.
    gathered = 2 * estimate.largest_page + 12 * max(shape.heads for shape in estimate.shapes) * PAGE_SIZE
    repeated = max(2 * (heads + kv_heads) * dim * ops.dtype.itemsize for heads, kv_heads, dim in estimate.shapes)
    return gathered, repeated + rows * (5 + 12 * estimate.sinks)
