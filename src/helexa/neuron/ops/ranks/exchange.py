"""How the ranks of a group exchange results."""

from typing import Protocol

from torch import Tensor

from helexa.neuron.ops.ranks.shares import Shares


class Exchange(Protocol):
    """The interface of all exchanges.

    Attributes:
        memory: uint8, memory that the ranks of one host share, in the layout of `kernels/ranks.c`; None if the exchange
            has no such memory.
    """

    memory: Tensor | None

    @property
    def seconds(self) -> float:
        """Time that this rank has spent in exchanges so far, in seconds."""
        ...

    def stack(self, x: Tensor) -> Tensor:
        """Return the tensors x [T, N] of all ranks, [ranks, T, N]."""
        ...

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`] (see `Ops.gather`)."""
        ...
