"""The vector of a text: hidden states of its tokens, pooled while the steps compute them."""

import numpy as np

from helexa.neuron.engine.ipc.messages import Pooling
from helexa.neuron.engine.step.step_input import Float32


class PooledVector:
    """Gathers one sequence's hidden states.

    Args:
        pooling: the mean of all tokens', the last one's, or the first one's (`cls`).
        length: tokens of the sequence.
    """

    def __init__(self, pooling: Pooling, length: int) -> None:
        self._positions = {"mean": range(length), "last": range(length - 1, length), "cls": range(1)}[pooling]
        self._sum: Float32 | None = None

    def wanted(self, start: int, stop: int) -> range:
        """Which of these positions count."""
        return range(max(start, self._positions.start), min(stop, self._positions.stop))

    def add(self, start: int, total: Float32 | None) -> None:
        """Take a step's part.

        Args:
            start: position of the step's first token; 0 if all is computed anew.
            total: float32 [H], the sum of the hidden states at the wanted positions; None if there are none.
        """
        if start == 0:
            self._sum = None
        if total is not None:
            self._sum = total if self._sum is None else self._sum + total

    def is_sound(self, start: int, total: Float32 | None) -> bool:
        """Whether it would be all finite numbers after `add`."""
        parts = [part for part in (self._sum if start else None, total) if part is not None]
        return bool(parts) and all(bool(np.isfinite(part).all()) for part in parts)

    def finish(self) -> list[float]:
        """The vector, when the last token is computed; empty if it is not all finite numbers."""
        if self._sum is None or not bool(np.isfinite(self._sum).all()):
            return []
        return (self._sum / len(self._positions)).tolist()
