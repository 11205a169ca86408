"""Computes the embedding of a text from the hidden states of its tokens, over one or several steps."""

import numpy as np

from helexa.neuron.engine.ipc.messages import Pooling
from helexa.neuron.engine.step.step_input import Float32


class PooledVector:
    """The embedding of one sequence while its steps run: sums hidden states.

    Args:
        pooling: hidden states that form the vector: `mean` of all tokens, the `last` token or the first token (`cls`).
        length: number of tokens of the sequence.
    """

    def __init__(self, pooling: Pooling, length: int) -> None:
        self._positions = {"mean": range(length), "last": range(length - 1, length), "cls": range(1)}[pooling]
        self._sum: Float32 | None = None

    def wanted(self, start: int, stop: int) -> range:
        """Return the positions in [start, stop) whose hidden states the embedding needs."""
        return range(max(start, self._positions.start), min(stop, self._positions.stop))

    def add(self, start: int, total: Float32 | None) -> None:
        """Add the hidden states of one step to the sum.

        Args:
            start: position of the step's first token in the sequence; 0 restarts the sum.
            total: float32 [H], the sum of the hidden states at the positions of `wanted`; None if the step has no such
                position.
        """
        if start == 0:
            self._sum = None
        if total is not None:
            self._sum = total if self._sum is None else self._sum + total

    def stays_finite(self, start: int, total: Float32 | None) -> bool:
        """Return whether the sum would be finite after a call of `add` with these arguments; change nothing."""
        sums = [array for array in (self._sum if start else None, total) if array is not None]
        return bool(sums) and all(bool(np.isfinite(array).all()) for array in sums)

    def finish(self) -> list[float]:
        """Return the embedding vector. Call after the last token; the result is empty if the vector is not finite."""
        if self._sum is None or not bool(np.isfinite(self._sum).all()):
            return []
        return (self._sum / len(self._positions)).tolist()
