"""The pipeline stage: the decoder layers that this process computes."""

from typing import Protocol

from helexa.neuron import tensors
from helexa.neuron.ops.interface import Ops
from helexa.neuron.tensors import Tensor


class HiddenExchange(Protocol):
    """Exchanges hidden states with the other stages, in rank 0 of each stage."""

    def receive(self, rows: int, width: int) -> Tensor:
        """Wait for the previous stage; return its hidden states, float32 [rows, width]."""
        ...

    def send(self, hidden: Tensor, rows: int) -> Tensor:
        """Send this stage's hidden states to the next stage; from the last, to stage 0.

        In stage 0, wait for the last stage, and return its hidden states [`rows`, H]. In later stages, return `hidden`,
        which is [rows, H].
        """
        ...


class Stage:
    """The decoder layers that this process computes.

    Stage 0 has the embedding, the first layers, the final norm and the output head. The last stage returns its hidden
    states to stage 0, which therefore samples, and computes log-probabilities and embeddings, as without a pipeline.
    """

    def __init__(self, layers: range | None = None, exchange: HiddenExchange | None = None) -> None:
        self._layers = layers  # the layers; None for all layers of the model
        # exchange with the other stages; None if there are no other stages, and in ranks other than rank 0
        self._exchange = exchange

    @property
    def is_whole_model(self) -> bool:
        """Whether this process computes all layers."""
        return self._layers is None

    @property
    def is_first(self) -> bool:
        """Whether this is stage 0."""
        return self._layers is None or self._layers.start == 0

    def layers(self, count: int) -> range:
        """Return the layers of this stage, if the model has `count` layers."""
        return range(count) if self._layers is None else self._layers

    def receive(self, ops: Ops, rows: int, width: int) -> Tensor:
        """Call `HiddenExchange.receive` on rank 0, and return the result on all ranks."""
        if self._exchange is None:
            # Only rank 0 has an exchange. `_shared` adds the zeros of this rank to the hidden states of rank 0.
            return _shared(ops, tensors.zeros(rows, width, device=ops.device))
        return _shared(ops, self._exchange.receive(rows, width).to(ops.device))

    def send(self, ops: Ops, hidden: Tensor, rows: int) -> Tensor:
        """Call `HiddenExchange.send` on rank 0, and return the result on all ranks."""
        if not self.is_first:
            return hidden if self._exchange is None else self._exchange.send(hidden, rows)
        if self._exchange is None:
            return _shared(ops, tensors.zeros(rows, hidden.shape[1], device=ops.device))
        return _shared(ops, self._exchange.send(hidden, rows).to(ops.device))


def _shared(ops: Ops, hidden: Tensor) -> Tensor:
    """Return the hidden states of rank 0 on all ranks.

    On the other ranks, `hidden` must be 0, so the sum over all ranks equals the states of rank 0.
    """
    return hidden if ops.ranks.count == 1 else ops.sum_ranks(hidden)


WHOLE_MODEL = Stage()  # The stage of a model that one host computes alone
