"""Buffers in host and device memory for the inputs of steps."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.engine.execution.buckets import MAX_DRAFT_ROWS
from helexa.neuron.engine.step.step_input import Int32, StepInput
from helexa.neuron.ops.batch import Batch, Capacity, SpanTable

_ALIGNED = 16  # every array starts at a multiple of this many numbers, so that kernels can read several numbers at once
_AXES = 3  # maximum axes of positions
_NOWHERE = -1  # slot of padding rows


class StepBuffers:
    """Copies step inputs to buffers with fixed addresses, and returns them as batches that kernels read.

    Captured graphs require that batches of the same shape have the same addresses.

    Args:
        capacity: size of the largest batch.
        device: device of the batches.
        packed: True for a GPU. The arrays of a step are then adjacent in pinned host memory, one copy transfers them to
            the device, and batches are padded to their buckets. If False, host and device share memory. Each array then
            has the same address in every step, and the span arrays are not copied.
    """

    def __init__(self, capacity: Capacity, device: torch.device, packed: bool) -> None:
        self._capacity = capacity
        self._packed = packed
        spans = capacity.sequences if packed else 0
        sizes = (*[capacity.rows] * (3 + _AXES), *[spans + 1] * 4, spans * _rounded(capacity.pages_per_sequence))
        size = sum(_rounded(array_size) for array_size in sizes)
        pinned = packed and device.type == "cuda"
        # Two host buffers if packed: the device may still copy from one buffer while the host fills the other.
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(1 + packed)]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if pinned else []
        self._device = torch.zeros(size, dtype=torch.int32, device=device) if packed else self._hosts[0]
        self._turn = 0

    def load(self, step: StepInput) -> Batch:
        """Copy a step input to the buffers, and return it as a batch. The batch is valid until the next call."""
        bucket, capacity = step.bucket, self._capacity
        if bucket is None:
            rows, samples, (spans, width) = len(step.tokens), len(step.sample_rows), step.pages.shape
            lengths = np.diff(step.starts)
            singles = spans if rows == spans else int(np.count_nonzero(lengths == 1))
            most_rows = int(lengths[singles:].max()) if singles < spans else 0
        else:
            (rows, spans), samples, width = bucket, bucket.rows, capacity.pages_per_sequence
            singles = spans if rows == spans else 0
            most_rows = 0 if singles else MAX_DRAFT_ROWS
        axes = step.positions.shape[:-1]
        layout = _Layout(self._next_host(), self._device, self._packed)
        tokens = layout.add(step.tokens, rows, capacity.rows)
        slots = layout.add(step.slots, rows, capacity.rows, _NOWHERE)
        sample_rows = layout.add(step.sample_rows, samples, capacity.rows)
        positions = layout.add(step.positions.ravel(), rows * (*axes, 1)[0], capacity.rows * _AXES)
        table = None
        if self._packed:
            table = SpanTable(
                starts=layout.add(step.starts, spans + 1, capacity.sequences + 1, int(step.starts[-1])),
                prefixes=layout.add(step.prefixes, spans, capacity.sequences),
                settled=layout.add(step.settled, spans, capacity.sequences),
                state_slots=layout.add(step.state_slots, spans, capacity.sequences),
                pages=layout.add_table(step.pages, spans, _rounded(width)),
            )
            layout.send()
        if self._copied:
            self._copied[self._turn].record()
        on_device = self._device.device
        return Batch(
            tokens=tokens,
            positions=positions.view(*axes, rows),
            slots=slots,
            sample_rows=sample_rows,
            host_spans=SpanTable(step.starts, step.prefixes, step.settled, step.state_slots, step.pages),
            device_spans=table,
            singles=singles,
            most_rows=most_rows,
            samples=step.samples,
            pooled=step.pooled,
            capacity=capacity,
            bucket=bucket,
            embeddings=_on_device(step.embeddings, on_device),
            embedding_rows=_on_device(step.embedding_rows, on_device),
            deepstack=_on_device(step.deepstack, on_device),
            attention_ends=step.attention_ends,
        )

    def _next_host(self) -> Tensor:
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._hosts[self._turn]


def _on_device(array: NDArray[Any] | None, device: torch.device) -> Tensor | None:
    return None if array is None else torch.from_numpy(array).to(device)


class _Layout:
    """Writes the arrays of a step one after another, at the same offsets in the host buffer and the device buffer.

    Args:
        packed: whether each array starts directly after the previous array. If False, each array starts at an offset
            that is the same for all steps, because the maximum size is reserved for every array.
    """

    def __init__(self, host: Tensor, device: Tensor, packed: bool) -> None:
        self._host, self._device, self._packed = host, device, packed
        self._numbers: Int32 = host.numpy()
        self._end = 0

    def add(self, values: Int32, size: int, most: int, filler: int = 0) -> Tensor:
        """Copy an array to the host buffer. Return the view of the device buffer to which `send` copies the array.

        Args:
            values: the array.
            size: size to which the array is padded with `filler`.
            most: maximum size of this array in any step.
        """
        start, count = self._end, len(values)
        self._end += _rounded(size if self._packed else most)
        self._numbers[start : start + count] = values
        if count < size:
            self._numbers[start + count : start + size] = filler
        return self._device[start : start + size]

    def add_table(self, values: Int32, lines: int, width: int) -> Tensor:
        """Copy the table `values` to the host buffer. Return the view of the device buffer to which `send` copies it.

        The view has the shape [lines, width]. If `values` has fewer lines or columns, the remaining numbers are
        undefined. The table must be the last array.
        """
        start, count = self._end, lines * width
        self._end += count
        self._numbers[start : self._end].reshape(lines, width)[: len(values), : values.shape[1]] = values
        return self._device[start : self._end].view(lines, width)

    def send(self) -> None:
        """Copy all arrays to the device in one transfer."""
        self._device[: self._end].copy_(self._host[: self._end], non_blocking=True)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
