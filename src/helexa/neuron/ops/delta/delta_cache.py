"""Recurrent states of a Gated DeltaNet layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeltaCache:
    """The recurrent states of one Gated DeltaNet layer.

    Each state slot contains the state of one running sequence, or a snapshot (saved copy) of a state.

    Attributes:
        conv: [slots, K - 1, C], the last inputs of the convolution over K tokens and C columns. In Triton kernels, a
            ring buffer [slots, K, C].
        state: float32 [slots, Hv, Dk, Dv], the state matrix of each of the Hv value heads, for keys of width Dk and
            values of width Dv.
    """

    conv: Tensor
    state: Tensor

    def copy(self, source: int, target: int) -> None:
        """Copy the recurrent state in the slot `source` to the slot `target`."""
        self.conv[target] = self.conv[source]
        self.state[target] = self.state[source]

    def clear(self, slot: int) -> None:
        """Set the recurrent state in a slot to zero, as at the start of a sequence."""
        self.conv[slot] = 0
        self.state[slot] = 0

    def at(self, slot: int) -> "DeltaCache":
        """Return a cache with only the slot `slot`, which shares the memory of this cache."""
        return DeltaCache(self.conv[slot : slot + 1], self.state[slot : slot + 1])

    def clone(self) -> "DeltaCache":
        """Return a copy of all slots in new memory."""
        return DeltaCache(self.conv.clone(), self.state.clone())

    def gather(self, slots: Tensor) -> "DeltaCache":
        """Return a cache with copies of the B recurrent states in the slots `slots` [B]."""
        return DeltaCache(self.conv.index_select(0, slots), self.state.index_select(0, slots))

    def scatter(self, slots: Tensor, states: "DeltaCache") -> None:
        """Write the B recurrent states that `gather` returned back to the slots `slots` [B]."""
        self.conv.index_copy_(0, slots, states.conv)
        self.state.index_copy_(0, slots, states.state)
