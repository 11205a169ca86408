"""Recorded forward passes: the same kernels on the same memory, run again without Python in between."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helexa.neuron.ops.library import Instruction, KernelLibrary

_MAX_GRAPHS = 96


class NotRecordable(Exception):
    """A forward pass computes something outside the native kernels, which a replay would leave out."""


class Graphs:
    """Recordings by shape, the least recently used forgotten first."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._recorded: OrderedDict[tuple[int, ...], tuple[np.ndarray, Tensor]] = OrderedDict()
        self._instructions: list[Instruction] | None = None

    def launch(self, instruction: Instruction) -> None:
        """Take the instruction down while recording, else run it now."""
        if self._instructions is None:
            self._library.run(self._library.encode([instruction]))
        else:
            self._instructions.append(instruction)

    def run(self, shape: tuple[int, ...], forward: Callable[[], Tensor]) -> Tensor:
        """What `forward` returns, from its recording for `shape`, which is made the first time.

        Inputs must lie where they lay then. The result is good until the next run of the same shape.

        Raises:
            NotRecordable: nothing has been computed.
        """
        found = self._recorded.get(shape)
        if found is None:
            found = self._recorded[shape] = self._record(forward)
            if len(self._recorded) > _MAX_GRAPHS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(shape)
        tape, result = found
        self._library.run(tape)
        return result

    def _record(self, forward: Callable[[], Tensor]) -> tuple[np.ndarray, Tensor]:
        self._instructions = []
        try:
            with _OnlyViews():
                result = forward()
            return self._library.encode(self._instructions), result
        finally:
            self._instructions = None


class _OnlyViews(TorchDispatchMode):
    """Lets views pass, since they compute nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "frombuffer" not in str(func):
            raise NotRecordable(str(func))
        return func(*args, **(kwargs or {}))
