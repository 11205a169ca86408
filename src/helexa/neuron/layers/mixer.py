"""The part of a block that lets positions see one another: attention, or a recurrence."""

from typing import Any, Protocol

from torch import Tensor

from helexa.neuron.layers.step import Step


class Mixer(Protocol):
    """What a block and the runner ask of it.

    Attributes:
        page_bytes: of what it keeps of the positions of one page; 0 if it keeps nothing by position.
        state_bytes: of what it keeps of one sequence whatever its length; 0 if that is nothing.
    """

    page_bytes: int
    state_bytes: int

    def new_cache(self, pages: int, slots: int) -> Any:
        """What it keeps, for `pages` pages and for `slots` sequences.

        Whatever has `state_bytes` makes an object with `copy(source, target)`, which copies the state of one slot to
        another.
        """
        ...

    def __call__(self, x: Tensor, cache: Any, step: Step, rows: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], or [S, H] for `rows` [S] only; takes this step into `cache`."""
        ...
