"""Computes the embedding of a text from the hidden states of its tokens. The computation may take several steps."""

import numpy as np

from helexa.neuron.engine.ipc.messages import Pooling
from helexa.neuron.engine.step.step_input import Float32


class PooledVector:
    """Computes the embedding of one sequence: sums the hidden states that its steps compute.

    Args:
        pooling: which hidden states form the embedding: the `mean` of all tokens, the `last` token or the first token
            (`cls`).
        length: number of tokens of the sequence.
    """

    def __init__(self, pooling: Pooling, length: int) -> None:
        self._positions = {"mean": range(length), "last": range(length - 1, length), "cls": range(1)}[pooling]
        self._sum: Float32 | None = None

    def wanted(self, start: int, stop: int) -> range:
        """Return the positions from `start` to `stop` (exclusive) whose hidden states the embedding needs."""
        return range(max(start, self._positions.start), min(stop, self._positions.stop))

    def add(self, start: int, total: Float32 | None) -> None:
        """Add the hidden states of one step to the sum.

        Args:
            start: position of the step's first token in the sequence. If it is 0, the sum restarts, because the
                sequence was preempted or is new.
            total: float32 [H] (H: hidden size), the sum of the hidden states of the step at the positions that `wanted`
                returns; None if there are no such positions.
        """
        if start == 0:
            self._sum = None
        if total is not None:
            self._sum = total if self._sum is None else self._sum + total

    def stays_finite(self, start: int, total: Float32 | None) -> bool:
        """Return whether the sum would be finite after a call of `add` with these arguments. The sum is not changed."""
        sums = [array for array in (self._sum if start else None, total) if array is not None]
        return bool(sums) and all(bool(np.isfinite(array).all()) for array in sums)

    def finish(self) -> list[float]:
        """Return the embedding, after `add` was called for the last step. It is empty if it is not finite."""
        if self._sum is None or not bool(np.isfinite(self._sum).all()):
            return []
        return (self._sum / len(self._positions)).tolist()
