"""Interface of the sublayer of a block that mixes positions: attention or a recurrence."""

from typing import Any, Protocol

from torch import Tensor

from helexa.neuron.layers.step import Step


class Mixer(Protocol):
    """The sublayer of a decoder layer that mixes information between positions: attention or Gated DeltaNet.

    Attributes:
        page_bytes: bytes of this layer's KV cache per KV page; 0 for a recurrent layer.
        state_bytes: bytes of this layer's recurrent state per sequence, for any sequence length; 0 for attention.
    """

    page_bytes: int
    state_bytes: int

    def new_cache(self, pages: int, slots: int) -> Any:
        """Return a cache for `pages` KV pages, or for the recurrent states of `slots` state slots.

        A cache of recurrent states has a method `copy(source, target)`, which copies the state of one slot to another.
        """
        ...

    def __call__(self, x: Tensor, cache: Any, step: Step, rows: Tensor | None = None) -> Tensor:
        """Update `cache` with the rows of this step, and return the outputs.

        Args:
            x: [T, H], inputs of the layer: T rows (tokens of the batch), H the hidden size.
            rows: int32 [S], indexes of the rows to return; None for all rows.

        Returns:
            [T, H], or [S, H] if `rows` is given.
        """
        ...
