"""Estimates the memory of a model before loading: builds the model without reading weights, and adds up the sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.engine.loading.unread_tensors import require_all_read
from helexa.neuron.layers.embedding import Embedding
from helexa.neuron.layers.loader import Loader, own_part, require_shape
from helexa.neuron.layers.stage import WHOLE_MODEL, Stage
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.ranks.shares import RowRange, Shares
from helexa.neuron.weights.checkpoint import Checkpoint
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.quantization.quant_policy import QuantPolicy
from helexa.neuron.weights.quantization.quantize import quantize


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory sizes and dimensions of a model, determined before its weights are loaded.

    Attributes:
        weights: bytes of the weights in the format of the kernels.
        loading: peak bytes during loading, without `weights`.
        page: bytes of K and V of one KV page in all layers.
        state: bytes of the recurrent state of one sequence.
        hidden: width of the residual stream.
        widest: largest number of input and output values per row of a matrix product, without the output head.
        heads, kv_heads, head_dim: number of query heads, number of KV heads, and size of a head in attention layers.
        sinks: number of heads with an attention sink in one layer.
        vocab_size: number of logits per row.
        layers: number of layers that use KV pages.
        context: number of positions that the model was trained for.
    """

    weights: int
    loading: int
    page: int
    state: int
    hidden: int
    widest: int
    heads: int
    kv_heads: int
    head_dim: int
    sinks: int
    vocab_size: int
    layers: int
    context: int


def estimate_memory(
    checkpoint: Checkpoint,
    architecture: Callable[[dict[str, Any], Loader], Decoder],
    config: dict[str, Any],
    ops: Ops,
    policy: QuantPolicy,
    stage: Stage = WHOLE_MODEL,
) -> MemoryEstimate:
    """Return the memory that a model needs with the kernels `ops`, without reading its weights.

    Raises:
        ModelFileError: the model cannot be built, or does not read all tensors of the checkpoint.
    """
    sizes = WeightSizes(checkpoint, ops, policy, stage)
    model = architecture(config, sizes)
    kind = str(checkpoint.config.get("model_type"))
    require_all_read(checkpoint, sizes.read, stage, model.settings.layers, kind)
    mixers = [block.mixer for block in model.blocks]
    settings = model.settings
    return MemoryEstimate(
        weights=sizes.allocated,
        loading=sizes.peak - sizes.allocated,
        page=sum(mixer.page_bytes for mixer in mixers),
        state=sum(mixer.state_bytes for mixer in mixers),
        hidden=settings.hidden,
        widest=sizes.widest,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        sinks=settings.heads if any(name.endswith(".sinks") for name in checkpoint.names()) else 0,
        vocab_size=model.vocab_size,
        layers=sum(mixer.page_bytes > 0 for mixer in mixers),
        context=settings.context,
    )


@dataclass(frozen=True, eq=False)
class _Matrix:
    """Placeholder for a weight matrix in the format of the kernels. It has a size but no contents.

    Attributes:
        weight: the weight from which the matrix would be made, as a tensor on torch's meta device.
        nbytes: bytes that the matrix would need.
    """

    weight: Weight
    nbytes: int


class WeightSizes(Loader):
    """A loader that reads no weights. It counts the bytes that loading the model would allocate and free.

    Attributes:
        allocated: bytes that loading would have allocated and not freed so far.
        peak: maximum memory during loading so far, including temporary arrays.
        widest: largest number of input and output values per row of a matrix product so far, without the output head.
        read: names of the tensors that loading would have read so far.
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops, policy: QuantPolicy, stage: Stage) -> None:
        super().__init__(checkpoint, ops, lambda done: None, policy=policy, stage=stage)
        self.allocated = self.peak = self.widest = 0
        self.read: set[str] = set()
        self._quantization = policy
        self._embedding: Embedding | None = None

    def prepared(
        self,
        key: str,
        shape: tuple[int, ...],
        read: Callable[[], Weight],
        ranges: Sequence[RowRange] = (),
        columns: RowRange | None = None,
    ) -> _Matrix:
        """Count the bytes of a weight matrix in the kernels' format, and return a placeholder.

        `read` is not called, so no weights are read.
        """
        name = key.partition("#")[0]
        self.read.add(name)
        weight = self.checkpoint.on_meta(name, own_part(shape, ranges, columns))
        transient_bytes = weight.nbytes
        quant_format = self._quantization.form(key, shape[-1])
        if quant_format is not None and isinstance(weight, Tensor):
            weight = quantize(weight, quant_format) or weight
            transient_bytes += weight.nbytes
        matrix = _Matrix(weight, self.ops.matrix_bytes(weight))
        self._take(matrix.nbytes, transient_bytes)
        return matrix

    def plain(self, name: str, shape: tuple[int, ...], ranges: Sequence[RowRange] = ()) -> Tensor:
        """Count the bytes of a tensor that kernels use unchanged. Return a placeholder that needs almost no memory."""
        self.read.add(name)
        require_shape(name, self.checkpoint.shape(name), shape)
        ones = torch.ones((), device=self.ops.device).expand(own_part(shape, ranges))
        self._take(ones.nbytes)
        return ones

    def embedding(self, name: str, width: int) -> Embedding:
        """Return the embedding layer. Its matrix counts as allocated even if a matrix product copies it."""
        self._embedding = super().embedding(name, width)
        return self._embedding

    def product(self, matrices: Sequence[_Matrix], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Count the bytes of a product with concatenated matrices, and return a placeholder function."""
        outputs = _outputs(matrices)
        if self._embedding is None or outputs != len(self._embedding.shares.own):
            self.widest = max(self.widest, outputs + matrices[0].weight.shape[1])
        self._multiply(matrices)
        return lambda x: x

    def gathered(self, product: LinearOp, shares: Shares) -> LinearOp:
        """Count the width of a product whose result has the outputs of all ranks."""
        if self._embedding is None or shares.total != self._embedding.vocab_size:
            self.widest = max(self.widest, shares.total)
        return product

    def summed(self, product: Callable[..., Tensor], outputs: int) -> Callable[..., Tensor]:
        """Count the width of the partial results of all ranks, which are gathered before they are added."""
        self.widest = max(self.widest, self.ranks * outputs)
        return product

    def mixture(
        self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None, shares: ExpertShares | None
    ) -> MixtureOp:
        """Count the bytes of a mixture of experts; return a placeholder function for the mixture."""
        gate_ups, downs = (
            [matrix for expert in experts for matrix in expert.gate_up],
            [expert.down for expert in experts],
        )
        self.widest = max(self.widest, routing.chosen * (_outputs(experts[0].gate_up) + _outputs(downs[:1])))
        self._multiply(gate_ups, downs)
        return lambda x, scores: x

    def _multiply(self, *products: Sequence[_Matrix]) -> None:
        """Count the bytes of matrix products.

        Matrices that a product copies are freed afterwards, except the embedding's matrix.
        """
        copied = [parts for parts in products if self._take(*self.ops.product_bytes([part.weight for part in parts]))]
        embedding_matrix = None if self._embedding is None else self._embedding.matrix
        self.allocated -= sum(part.nbytes for parts in copied for part in parts if part is not embedding_matrix)

    def _take(self, size: int, temporary: int = 0) -> int:
        """Count `size` bytes as allocated, and `temporary` bytes as allocated only for a moment. Return `size`."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated + temporary)
        return size


def _outputs(parts: Sequence[_Matrix]) -> int:
    return sum(part.weight.shape[0] for part in parts)
