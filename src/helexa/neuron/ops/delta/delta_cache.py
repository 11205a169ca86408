"""What the Gated DeltaNet layers keep of each sequence."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeltaCache:
    """What each slot has seen, float32.

    Attributes:
        conv: [slots, K - 1, C], what the convolution saw last.
        state: [slots, Hv, Dk, Dv].
    """

    conv: Tensor
    state: Tensor

    def copy(self, source: int, target: int) -> None:
        """Copy the state of one slot to another."""
        self.conv[target] = self.conv[source]
        self.state[target] = self.state[source]

    def clear(self, slot: int) -> None:
        """Nothing was seen yet."""
        self.conv[slot] = 0
        self.state[slot] = 0

    def at(self, slot: int) -> "DeltaCache":
        """A view of one slot."""
        return DeltaCache(self.conv[slot : slot + 1], self.state[slot : slot + 1])

    def clone(self) -> "DeltaCache":
        """The same in memory of its own."""
        return DeltaCache(self.conv.clone(), self.state.clone())

    def gather(self, slots: Tensor) -> "DeltaCache":
        """Copies of several slots [B]."""
        return DeltaCache(self.conv.index_select(0, slots), self.state.index_select(0, slots))

    def scatter(self, slots: Tensor, part: "DeltaCache") -> None:
        """Put them back."""
        self.conv.index_copy_(0, slots, part.conv)
        self.state.index_copy_(0, slots, part.state)
