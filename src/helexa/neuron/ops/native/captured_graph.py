"""Captured forward passes on the CPU, and the allocator of their tensors.

A capture records the kernel calls of a step. A replay runs them without Python between kernels, on the same memory.
"""

import math
import mmap
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helexa.neuron import tensors
from helexa.neuron.ops.native.kernel_library import PLAIN, Argument, KernelLibrary
from helexa.neuron.tensors import DType, Tensor

_LEAST = 64  # minimum size of a buffer in bytes
_CHUNK = 1 << 20  # buffers of fewer bytes are cut from chunks of this size

# Maximum bytes of recorded kernel calls, enough for about 500 graphs of a 30-layer model. If a removed graph is needed
# again, the new capture takes a tenth of the time of a small step.
_MAX_BYTES = 32 << 20


class Workspace:
    """Allocator for temporary tensors.

    The memory of a tensor returns to a free list when its last view is freed. A captured graph uses the same memory in
    each replay, also while the memory is in the free list. A tensor is therefore valid only until the next graph runs.
    Copy a tensor that is needed in later steps.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = defaultdict(list)
        self._unused = memoryview(b"")
        self._blocks: dict[int, memoryview] = {}

    def take(self, *shape: int, dtype: DType | None = None) -> Tensor:
        """Return an uninitialized tensor of `shape`, float32 by default."""
        kind: DType = tensors.float32 if dtype is None else dtype
        count = math.prod(shape)
        size = max(_LEAST, 1 << max(count * kind.itemsize - 1, 0).bit_length())
        free = self._free[size]
        block = free.pop() if free else self._new(size)
        tensor = self._lend(block, kind)
        self._blocks[tensors.storage_address(tensor)] = block
        return tensor[:count].view(shape)

    def take_again(self, address: int, *shape: int) -> Tensor | None:
        """Return an uninitialized float32 tensor at the address of an earlier tensor.

        The result is None if the memory is in use, or if no earlier tensor had this address.
        """
        block = self._blocks.get(address)
        if block is None:
            return None
        free = self._free[len(block)]
        place = next((i for i, candidate in enumerate(free) if candidate is block), None)
        return None if place is None else self._lend(free.pop(place), tensors.float32)[: math.prod(shape)].view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the memory of `tensor` belongs to this workspace."""
        return tensors.may_be_lent(tensor) and tensors.storage_address(tensor) in self._blocks

    def spoil(self) -> None:
        """Fill all free memory with NaN, so that reads of old data yield NaN."""
        for size, blocks in self._free.items():
            for block in blocks:
                block[:] = b"\xff" * size

    def _lend(self, block: memoryview, dtype: DType) -> Tensor:
        return tensors.lent(block, dtype, self._free[len(block)].append)

    def _new(self, size: int) -> memoryview:
        if size >= _CHUNK:
            return memoryview(mmap.mmap(-1, size))
        if len(self._unused) < size:
            self._unused = memoryview(mmap.mmap(-1, _CHUNK))
        block, self._unused = self._unused[:size], self._unused[size:]
        return block


@dataclass
class CapturedGraph:
    """A captured forward pass on the CPU."""

    calls: bytes  # the recorded kernel calls, as concatenated instructions (see `KernelLibrary.run`)
    # Address of the result. Between replays, the workspace may use this memory for other tensors. Separate memory for
    # the logits of each of the many graphs would be too large.
    address: int
    shape: tuple[int, ...]  # shape of the result
    # Tensors outside the workspace that the kernels read or write. The graph keeps these tensors allocated.
    inputs: list[Tensor]


class Graphs:
    """The captured forward passes, by three numbers that describe the shape of a pass.

    The numbers are: rows (tokens) of the batch, rows whose tokens are sampled, and tensors in `inputs` (see `run`).
    """

    def __init__(self, library: KernelLibrary, workspace: Workspace) -> None:
        self._library = library
        self._workspace = workspace
        self._graphs: OrderedDict[tuple[int, int, int], CapturedGraph] = OrderedDict()
        self._instructions: list[bytes] | None = None
        self._inputs: list[Tensor] = []
        self._complete: bool | None = None

    @property
    def complete(self) -> bool | None:
        """Whether graphs compute the whole forward pass; None before the check.

        The value is False if the model also computes outside the native kernels, for example in plain torch. A graph
        does not record this work.
        """
        return self._complete

    def launch(self, kernel: str, waits: bool, arguments: Mapping[str, Argument]) -> None:
        """Record the kernel call during a capture, else run the kernel."""
        instruction = self._library.instruction(kernel, arguments, waits)
        if self._instructions is None:
            self._library.run(instruction)
        else:
            self._instructions.append(instruction)
            # The graph keeps tensors outside the workspace allocated. The workspace never frees its memory.
            # Arguments that are not `PLAIN` are tensors.
            given: list[Any] = [value for value in arguments.values() if value.__class__ not in PLAIN]
            self._inputs += [value for value in given if not self._workspace.holds(value)]

    def run(
        self,
        inputs: Sequence[Tensor],
        samples: int,
        forward: Callable[[], Tensor],
        save_states: Callable[[], Callable[[], None]],
    ) -> Tensor:
        """Return the result of `forward`, by replay of a captured graph if possible.

        The next call may overwrite the result. To set `complete`, the first call with `samples` above 0 calls `forward`
        several times. While `complete` is not True, other calls only call `forward`.

        Args:
            inputs: tensors that the forward pass reads, with one entry per row (token). Their addresses must be the
                same in every run.
            samples: number of rows of the result, for which the engine samples tokens.
            save_states: function that saves the recurrent states, which a forward pass changes, and returns a function
                that restores them and may be called several times.
        """
        # The number of inputs is part of the key, because a batch with `Batch.window_slots` has one more input.
        shape = inputs[0].shape[0], samples, len(inputs)
        if self._complete is None and samples:
            restore_states = save_states()
            graph, result, self._complete = self._check(inputs, forward, restore_states)
            if self._complete:
                self._keep(shape, graph)
                return result
            restore_states()  # the run of the graph has changed the states
        if not self._complete:
            return forward()
        graph = self._graphs.get(shape)
        result = None if graph is None else self._workspace.take_again(graph.address, *graph.shape)
        if graph is None or result is None:
            graph, result = self._capture(forward)
            self._keep(shape, graph)
        else:
            self._graphs.move_to_end(shape)
        self._library.run(graph.calls)
        return result

    @property
    def call_bytes(self) -> int:
        """Total number of bytes of the captured kernel calls."""
        return sum(len(graph.calls) for graph in self._graphs.values())

    def _keep(self, shape: tuple[int, int, int], graph: CapturedGraph) -> None:
        self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        # The least recently used graphs are removed.
        while self.call_bytes > _MAX_BYTES:
            self._graphs.popitem(last=False)

    def _check(
        self, inputs: Sequence[Tensor], forward: Callable[[], Tensor], restore_states: Callable[[], None]
    ) -> tuple[CapturedGraph, Tensor, bool]:
        """Return a new graph, its result, and whether `forward` returns an equal result."""
        expected = forward().clone()
        values = [tensor.clone() for tensor in inputs]
        # If the model also computes outside the native kernels, the graph lacks this work. To make the graph's result
        # differ in this case, the graph is captured with other values in `inputs` and with NaN in free memory.
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value == 0)
        self._workspace.spoil()
        graph, result = self._capture(forward)
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value)
        restore_states()
        self._library.run(graph.calls)
        return graph, result, tensors.equal(result, expected)

    def _capture(self, forward: Callable[[], Tensor]) -> tuple[CapturedGraph, Tensor]:
        self._instructions, self._inputs = [], []
        try:
            result = forward()
            calls = b"".join(self._instructions)
            return CapturedGraph(calls, tensors.address(result), tuple(result.shape), self._inputs), result
        finally:
            self._instructions = None
