"""Recorded forward passes: a step's kernels on one tape, which runs without Python in between and may run again."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.ops.library import Instruction, KernelLibrary
from helexa.neuron.ops.workspace import Workspace

_MAX_KEPT = 96
_MAX_ROWS_KEPT = 64  # of a step; larger ones are rarely of the same shape twice, and recording them costs little of theirs


class Graphs:
    """Recordings by shape, the least recently used forgotten first."""

    def __init__(self, library: KernelLibrary, workspace: Workspace) -> None:
        self._library = library
        self._workspace = workspace
        self._kept: OrderedDict[tuple[int, int], tuple[np.ndarray, Tensor]] = OrderedDict()
        self._instructions: list[Instruction] | None = None
        self._sound: bool | None = None

    @property
    def sound(self) -> bool | None:
        """Whether recordings compute all of a forward pass; None while that is not known."""
        return self._sound

    def launch(self, instruction: Instruction) -> None:
        """Take the instruction down while recording, else run it now."""
        if self._instructions is None:
            self._library.run(self._library.encode([instruction]))
        else:
            self._instructions.append(instruction)

    def run(self, inputs: Sequence[Tensor], samples: int, forward: Callable[[], Tensor]) -> Tensor:
        """What `forward` returns: logits of `samples` rows, good until the next run of this shape.

        Args:
            inputs: tensors of one row per token that the pass reads; they lie where they lay at the last run.
        """
        if self._sound is None and samples:
            self._sound = self._check(inputs, forward)
        if not self._sound:
            return forward()
        rows = inputs[0].shape[0]
        found = self._kept.get((rows, samples))
        if found is None:
            found = self._record(forward)
            if rows <= _MAX_ROWS_KEPT:
                self._kept[rows, samples] = found
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end((rows, samples))
        tape, result = found
        self._library.run(tape)
        return result

    def _check(self, inputs: Sequence[Tensor], forward: Callable[[], Tensor]) -> bool:
        """Whether a recording gives what the pass itself gives.

        It is made from inputs that are nought and memory that is no number, so what is computed outside the kernels,
        and would be missing from the tape, comes out wrong.
        """
        expected = forward().clone()
        values = [tensor.clone() for tensor in inputs]
        for tensor in inputs:
            tensor.zero_()
        self._workspace.spoil()
        tape, result = self._record(forward)
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value)
        self._library.run(tape)
        return torch.equal(result, expected)

    def _record(self, forward: Callable[[], Tensor]) -> tuple[np.ndarray, Tensor]:
        self._instructions = []
        try:
            result = forward()
            return self._library.encode(self._instructions), result
        finally:
            self._instructions = None
