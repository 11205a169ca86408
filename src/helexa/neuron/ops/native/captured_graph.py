"""Recorded forward passes: a step's kernels on one tape, which runs without Python in between and may run again."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.ops.native.kernel_library import Argument, KernelLibrary
from helexa.neuron.ops.native.workspace import Workspace

_KEPT_BYTES = 32 << 20  # of tapes: some 500 for 30 layers, as recording one takes a tenth of the time of a small step


@dataclass
class Recording:
    """A tape and what it needs.

    Attributes:
        address, shape: of what the forward pass returned. Its memory is lent to whoever asked, not kept: there are many
            recordings, and logits are large.
        inputs: tensors that kernels read or write and that nobody else may hold.
    """

    tape: bytes
    address: int
    shape: tuple[int, ...]
    inputs: list[Tensor]


class Graphs:
    """Recordings by shape, the least recently used forgotten first."""

    def __init__(self, library: KernelLibrary, workspace: Workspace) -> None:
        self._library = library
        self._workspace = workspace
        self._kept: OrderedDict[tuple[int, int], Recording] = OrderedDict()
        self._instructions: list[bytes] | None = None
        self._inputs: list[Tensor] = []
        self._sound: bool | None = None

    @property
    def sound(self) -> bool | None:
        """Whether recordings compute all of a forward pass; None while that is not known."""
        return self._sound

    def launch(self, kernel: str, waits: bool, arguments: Mapping[str, Argument]) -> None:
        """Take a kernel call down while recording, else run it now (see `KernelLibrary.instruction`)."""
        instruction = self._library.instruction(kernel, arguments, waits)
        if self._instructions is None:
            self._library.run(instruction)
        else:
            self._instructions.append(instruction)
            # What torch made would be gone by the time the tape runs; the workspace's own is meant to be used again.
            tensors = (value for value in arguments.values() if isinstance(value, Tensor))
            self._inputs += [tensor for tensor in tensors if not self._workspace.holds(tensor)]

    def run(self, inputs: Sequence[Tensor], samples: int, forward: Callable[[], Tensor]) -> Tensor:
        """What `forward` returns: logits of `samples` rows, good until the next run.

        Args:
            inputs: tensors of one row per token that the pass reads; they lie where they lay at the last run.
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
        """What the tapes take."""
        return sum(len(recording.tape) for recording in self._kept.values())

    def _keep(self, shape: tuple[int, int], recording: Recording) -> None:
        self._kept[shape] = recording
        self._kept.move_to_end(shape)
        while self.kept_bytes > _KEPT_BYTES:
            self._kept.popitem(last=False)

    def _check(self, inputs: Sequence[Tensor], forward: Callable[[], Tensor]) -> bool:
        """Whether a recording gives what the pass itself gives.

        It is made from other inputs and from memory that is no number, so what is computed outside the kernels,
        and would be missing from the tape, comes out wrong.
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
            # `data_ptr()` of an empty tensor is 0, wherever it lies.
            address = result.untyped_storage().data_ptr() + int(result.storage_offset()) * result.itemsize
            return Recording(tape, address, tuple(result.shape), self._inputs), result
        finally:
            self._instructions = None
