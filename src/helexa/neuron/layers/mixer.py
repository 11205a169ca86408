"""Interface of the sublayer of a decoder layer that mixes positions: attention or a recurrence."""

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
        """Return the layer's cache: a KV cache of `pages` pages, or recurrent states in `slots` state slots.

        A cache of recurrent states has a method `copy(source, target)`, which copies the state of slot `source` to slot
        `target`.
        """
        ...

    def __call__(self, x: Tensor, cache: Any, step: Step, rows: Tensor | None = None) -> Tensor:
        """Update the KV cache or recurrent states in `cache` with all rows of the batch, and return the outputs.

        Args:
            x: [T, H], inputs of the layer: T rows (tokens of the batch), H the hidden size.
            cache: the cache from `new_cache`.
            step: the batch and its rotary tables.
            rows: int32 [S], indexes of the rows to return; None for all rows.

        Returns:
            [T, H], or [S, H] if `rows` is given.
        """
        ...
