"""State that all layers of one forward pass share."""

from torch import Tensor

from helexa.neuron.layers.rope import Rope
from helexa.neuron.ops.batch import Batch


class Step:
    """The batch, and rotary tables that are computed on first use."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def tables(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the batch's positions (see `Rope.tables`)."""
        if rope not in self._tables:
            self._tables[rope] = rope.tables(self.batch.positions)
        return self._tables[rope]
