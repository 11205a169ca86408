"""Computes the embedding of a text: pools the hidden states of its tokens over the steps that compute them."""

import numpy as np

from helexa.neuron.engine.ipc.messages import Pooling
from helexa.neuron.engine.step.step_input import Float32


class PooledVector:
    """Sums the hidden states of one sequence.

    Args:
        pooling: hidden states that form the vector: `mean` of all tokens, the `last` token or the first token (`cls`).
        length: number of tokens of the sequence.
    """

    def __init__(self, pooling: Pooling, length: int) -> None:
        self._positions = {"mean": range(length), "last": range(length - 1, length), "cls": range(1)}[pooling]
        self._sum: Float32 | None = None

    def wanted(self, start: int, stop: int) -> range:
        """Return the positions in [start, stop) whose hidden states are needed."""
        return range(max(start, self._positions.start), min(stop, self._positions.stop))

    def add(self, start: int, total: Float32 | None) -> None:
        """Add the hidden states of a step.

        Args:
            start: position of the step's first token; 0 restarts the sum.
            total: float32 [H], the sum of the hidden states at the wanted positions; None if the step has no such
                position.
        """
        if start == 0:
            self._sum = None
        if total is not None:
            self._sum = total if self._sum is None else self._sum + total

    def stays_finite(self, start: int, total: Float32 | None) -> bool:
        """Return whether the sum after `add(start, total)` would be finite."""
        sums = [array for array in (self._sum if start else None, total) if array is not None]
        return bool(sums) and all(bool(np.isfinite(array).all()) for array in sums)

    def finish(self) -> list[float]:
        """Return the vector, after the last token is computed; empty if the vector is not finite."""
        if self._sum is None or not bool(np.isfinite(self._sum).all()):
            return []
        return (self._sum / len(self._positions)).tolist()
