"""What all layers of one forward pass share."""

from torch import Tensor

from helexa.neuron.layers.rope import Rope
from helexa.neuron.ops.batch import Batch


class Step:
    """The batch, and tables that are made when the first layer asks for them."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def tables(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin of the batch's positions (see `Rope.tables`)."""
        if rope not in self._tables:
            self._tables[rope] = rope.tables(self.batch.positions)
        return self._tables[rope]
