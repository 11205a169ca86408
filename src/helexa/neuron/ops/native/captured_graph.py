"""Captured forward passes on the CPU: the recorded kernel calls of a step, replayed without Python between kernels."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.native.kernel_library import Argument, KernelLibrary
from helexa.neuron.ops.native.workspace import Workspace

_MAX_BYTES = 32 << 20  # about 500 graphs of a 30-layer model; a capture takes a tenth of the time of a small step


@dataclass
class CapturedGraph:
    """A captured forward pass on the CPU.

    The workspace is the allocator for the temporary tensors of a step.

    Attributes:
        calls: the recorded kernel calls, as concatenated instructions (see `KernelLibrary.run`).
        address: address of the result. Between replays, the workspace uses this memory for other tensors, because
            there are many graphs and logits are large.
        shape: shape of the result.
        inputs: tensors outside the workspace that the kernels read or write. The graph keeps these tensors allocated.
    """

    calls: bytes
    address: int
    shape: tuple[int, ...]
    inputs: list[Tensor]


class Graphs:
    """The captured forward passes of a model. There is one graph per number of rows and number of sampled rows.

    If the recorded kernel calls exceed 32 MiB, the least recently used graphs are removed.
    """

    def __init__(self, library: KernelLibrary, workspace: Workspace) -> None:
        self._library = library
        self._workspace = workspace
        self._graphs: OrderedDict[tuple[int, int], CapturedGraph] = OrderedDict()
        self._instructions: list[bytes] | None = None
        self._inputs: list[Tensor] = []
        self._complete: bool | None = None

    @property
    def complete(self) -> bool | None:
        """Whether captured graphs compute the whole forward pass of the model; None before the check.

        The value is False if the model also computes outside the native kernels, for example in plain torch. A graph
        does not record this work. The first `run` that returns logits checks whether a graph is complete.
        """
        return self._complete

    def launch(self, kernel: str, waits: bool, arguments: Mapping[str, Argument]) -> None:
        """Record a kernel call if a capture is in progress, else run the kernel (see `KernelLibrary.instruction`)."""
        instruction = self._library.instruction(kernel, arguments, waits)
        if self._instructions is None:
            self._library.run(instruction)
        else:
            self._instructions.append(instruction)
            # Keep tensors that torch allocated until the graph is removed; the workspace reuses its own memory.
            tensors = (value for value in arguments.values() if isinstance(value, Tensor))
            self._inputs += [tensor for tensor in tensors if not self._workspace.holds(tensor)]

    def run(
        self,
        inputs: Sequence[Tensor],
        samples: int,
        forward: Callable[[], Tensor],
        save_states: Callable[[], Callable[[], None]],
    ) -> Tensor:
        """Return the result of `forward`, by replay of a captured graph if possible. The next call may overwrite it.

        Args:
            inputs: tensors that the forward pass reads, with one entry per row (token). Their addresses must be the
                same in every run.
            samples: number of rows of the result, for which the engine samples tokens.
            forward: function that runs the forward pass and returns logits.
            save_states: function that saves the recurrent states, which a forward pass changes, and returns a function
                that restores them.
        """
        if self._complete is None and samples:
            self._complete = self._check(inputs, forward, save_states())
        if not self._complete:
            return forward()
        rows = inputs[0].shape[0]
        graph = self._graphs.get((rows, samples))
        result = None if graph is None else self._workspace.take_again(graph.address, *graph.shape)
        if graph is None or result is None:
            graph, result = self._capture(forward)
            self._keep((rows, samples), graph)
        else:
            self._graphs.move_to_end((rows, samples))
        self._library.run(graph.calls)
        return result

    @property
    def call_bytes(self) -> int:
        """Total number of bytes of the captured kernel calls."""
        return sum(len(graph.calls) for graph in self._graphs.values())

    def _keep(self, shape: tuple[int, int], graph: CapturedGraph) -> None:
        self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        while self.call_bytes > _MAX_BYTES:
            self._graphs.popitem(last=False)

    def _check(
        self, inputs: Sequence[Tensor], forward: Callable[[], Tensor], restore_states: Callable[[], None]
    ) -> bool:
        """Return whether the replay of a captured graph computes the same result as `forward`.

        If the model also computes outside the native kernels, the graph lacks this work. To make the result of the
        replay differ in this case, the graph is captured with other inputs and with free memory filled with NaN.
        """
        expected = forward().clone()
        values = [tensor.clone() for tensor in inputs]
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value == 0)
        self._workspace.spoil()
        graph, result = self._capture(forward)
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value)
        restore_states()
        self._library.run(graph.calls)
        return torch.equal(result, expected)

    def _capture(self, forward: Callable[[], Tensor]) -> tuple[CapturedGraph, Tensor]:
        self._instructions, self._inputs = [], []
        try:
            result = forward()
            calls = b"".join(self._instructions)
            # `data_ptr()` of an empty tensor is always 0.
            address = result.untyped_storage().data_ptr() + int(result.storage_offset()) * result.itemsize
            return CapturedGraph(calls, address, tuple(result.shape), self._inputs), result
        finally:
            self._instructions = None
