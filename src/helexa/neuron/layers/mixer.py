"""The part of a block that mixes positions: attention or a recurrence."""

from typing import Any, Protocol

from torch import Tensor

from helexa.neuron.layers.step import Step


class Mixer(Protocol):
    """The interface that blocks and the runner use.

    Attributes:
        page_bytes: bytes of its cache per KV page; 0 for a recurrent mixer.
        state_bytes: bytes of its state per sequence, independent of the length; 0 for attention.
    """

    page_bytes: int
    state_bytes: int

    def new_cache(self, pages: int, slots: int) -> Any:
        """Return a cache for `pages` KV pages and `slots` state slots.

        The cache of a mixer with `state_bytes` has a method `copy(source, target)` that copies the state of a slot.
        """
        ...

    def __call__(self, x: Tensor, cache: Any, step: Step, rows: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], or [S, H] for `rows` [S] only; writes this step to `cache`."""
        ...
