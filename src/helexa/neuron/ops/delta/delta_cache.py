"""Recurrent state of a Gated DeltaNet layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeltaCache:
    """Recurrent state per state slot.

    Attributes:
        conv: [slots, K - 1, C], the last inputs of the convolution.
        state: [slots, Hv, Dk, Dv], float32.
    """

    conv: Tensor
    state: Tensor

    def copy(self, source: int, target: int) -> None:
        """Copy the state of one slot to another."""
        self.conv[target] = self.conv[source]
        self.state[target] = self.state[source]

    def clear(self, slot: int) -> None:
        """Set the state of a slot to zero."""
        self.conv[slot] = 0
        self.state[slot] = 0

    def at(self, slot: int) -> "DeltaCache":
        """Return a view of one slot."""
        return DeltaCache(self.conv[slot : slot + 1], self.state[slot : slot + 1])

    def clone(self) -> "DeltaCache":
        """Return a copy in new memory."""
        return DeltaCache(self.conv.clone(), self.state.clone())

    def gather(self, slots: Tensor) -> "DeltaCache":
        """Return copies of the slots [B]."""
        return DeltaCache(self.conv.index_select(0, slots), self.state.index_select(0, slots))

    def scatter(self, slots: Tensor, states: "DeltaCache") -> None:
        """Write `states`, as returned by `gather`, to the slots [B]."""
        self.conv.index_copy_(0, slots, states.conv)
        self.state.index_copy_(0, slots, states.state)
