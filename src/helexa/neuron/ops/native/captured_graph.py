"""Captured forward passes: the kernel calls of a step, replayed without Python between the kernels."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.native.kernel_library import Argument, KernelLibrary
from helexa.neuron.ops.native.workspace import Workspace

_KEPT_BYTES = 32 << 20  # of graphs, some 500 for 30 layers; capturing takes a tenth of the time of a small step


@dataclass
class Recording:
    """A captured graph and the memory it uses.

    Attributes:
        tape: the kernel calls.
        address, shape: address and shape of the result. The workspace reuses this memory between runs, since there are
            many graphs and logits are large.
        inputs: tensors that kernels read or write; they must stay allocated as long as the graph exists.
    """

    tape: bytes
    address: int
    shape: tuple[int, ...]
    inputs: list[Tensor]


class Graphs:
    """Captured graphs by shape; the least recently used graphs are removed first."""

    def __init__(self, library: KernelLibrary, workspace: Workspace) -> None:
        self._library = library
        self._workspace = workspace
        self._kept: OrderedDict[tuple[int, int], Recording] = OrderedDict()
        self._instructions: list[bytes] | None = None
        self._inputs: list[Tensor] = []
        self._sound: bool | None = None

    @property
    def sound(self) -> bool | None:
        """Whether captured graphs compute a complete forward pass; None before the first check."""
        return self._sound

    def launch(self, kernel: str, waits: bool, arguments: Mapping[str, Argument]) -> None:
        """Record a kernel call during a capture, else run the call now (see `KernelLibrary.instruction`)."""
        instruction = self._library.instruction(kernel, arguments, waits)
        if self._instructions is None:
            self._library.run(instruction)
        else:
            self._instructions.append(instruction)
            # Keep tensors that torch allocated until the graph is removed; the workspace reuses its own memory.
            tensors = (value for value in arguments.values() if isinstance(value, Tensor))
            self._inputs += [tensor for tensor in tensors if not self._workspace.holds(tensor)]

    def run(self, inputs: Sequence[Tensor], samples: int, forward: Callable[[], Tensor]) -> Tensor:
        """Return the result of `forward`: logits of `samples` rows, valid until the next run.

        Args:
            inputs: tensors that the pass reads, with one row per token; their addresses must be the same in every run.
        """
        if self._sound is None and samples:
            self._sound = self._check(inputs, forward)
        if not self._sound:
            return forward()
        rows = inputs[0].shape[0]
        found = self._kept.get((rows, samples))
        result = None if found is None else self._workspace.take_again(found.address, *found.shape)
        if found is None or result is None:
            found, result = self._record(forward)
            self._keep((rows, samples), found)
        else:
            self._kept.move_to_end((rows, samples))
        self._library.run(found.tape)
        return result

    @property
    def kept_bytes(self) -> int:
        """Total bytes of the captured kernel calls."""
        return sum(len(recording.tape) for recording in self._kept.values())

    def _keep(self, shape: tuple[int, int], recording: Recording) -> None:
        self._kept[shape] = recording
        self._kept.move_to_end(shape)
        while self.kept_bytes > _KEPT_BYTES:
            self._kept.popitem(last=False)

    def _check(self, inputs: Sequence[Tensor], forward: Callable[[], Tensor]) -> bool:
        """Return whether a captured graph computes the same result as the pass itself.

        The capture uses other inputs and memory filled with NaN. Work outside the kernels is missing from the graph, so
        the replayed result differs.
        """
        expected = forward().clone()
        values = [tensor.clone() for tensor in inputs]
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value == 0)
        self._workspace.spoil()
        recording, result = self._record(forward)
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value)
        self._library.run(recording.tape)
        return torch.equal(result, expected)

    def _record(self, forward: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        self._instructions, self._inputs = [], []
        try:
            result = forward()
            tape = b"".join(self._instructions)
            # `data_ptr()` of an empty tensor is always 0.
            address = result.untyped_storage().data_ptr() + int(result.storage_offset()) * result.itemsize
            return Recording(tape, address, tuple(result.shape), self._inputs), result
        finally:
            self._instructions = None
