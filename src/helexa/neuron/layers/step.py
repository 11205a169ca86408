"""Data that all layers of one forward pass share."""

from torch import Tensor

from helexa.neuron.layers.rope import Rope
from helexa.neuron.ops.batch import Batch


class Step:
    """The batch of one forward pass, with the cos and sin tables of the rotary embeddings.

    A table is computed by the first layer that needs the table, and the other layers reuse it.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def tables(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return the cos and sin tables of `rope` for the positions of the batch (see `Rope.tables`)."""
        if rope not in self._tables:
            self._tables[rope] = rope.tables(self.batch.positions)
        return self._tables[rope]
