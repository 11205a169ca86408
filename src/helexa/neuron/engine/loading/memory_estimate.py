"""Estimates a model's memory before loading, and rejects tensors no layer reads.

The model is built without reading weights, and the sizes are added up.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.layers.loader import Loader, own_part, require_shape
from helexa.neuron.layers.parallel import Embedding
from helexa.neuron.layers.stage import WHOLE_MODEL, Stage
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.batch import AttentionShape
from helexa.neuron.ops.expert_routing_and_mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import HeadLinearOp, LinearOp
from helexa.neuron.ops.rank_group_and_shares import RowRange, Shares
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.checkpoint import Checkpoint, require_floats
from helexa.neuron.weights.quantization_formats import QuantPolicy
from helexa.neuron.weights.quantize import quantize
from helexa.neuron.weights.quantized_matrix import Weight

_SHOWN = 3
_LAYER = re.compile(r"model\.layers\.(\d+)\.", re.ASCII)
_UNNEEDED = re.compile(
    r"lm_head\.weight"  # unread only if the head is tied to the embedding; then a copy of the embedding
    r"|.*\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)"  # buffers that follow from the configuration
    r"|.*\.(?:self_attn|attn|attention)\.(?:masked_bias|bias)"  # constants of the causal mask in old checkpoints
    r"|.*\.(?:input|activation)_scale"  # scale of quantized activations; the kernels here do not need the scale
    r"|.*\.(?:[qkv]|kv|prob|attn)(?:_proj)?[._](?:output_)?scale|.*\.[kv]_proj\.[kv]_scale"  # scales of an fp8 KV cache
)


def require_all_read(
    checkpoint: Checkpoint, read: Collection[str], stage: Stage, layers: int, architecture: str, unneeded: str = r"(?!)"
) -> None:
    """Check that a model reads every required tensor of its checkpoint.

    Args:
        read: names of the tensors that the model of this stage reads.
        layers: number of decoder layers of the whole model.
        architecture: name of the model's architecture, for the error message.
        unneeded: regular expression of tensors that the architecture does not need (see `Decoder.unneeded`).

    Raises:
        ModelFileError: the model does not read a tensor. The message has the first names and what to do.
    """
    own, unneeded_names = stage.layers(layers), re.compile(f"{_UNNEEDED.pattern}|{unneeded}")
    unread: list[str] = []
    for name in checkpoint.names():
        layer = _LAYER.match(name)
        # Other stages read their own tensors. A layer beyond the model's number of layers is an error on every stage.
        elsewhere = int(layer[1]) not in own and int(layer[1]) < layers if layer else not stage.is_first
        if not elsewhere and name not in read and not unneeded_names.fullmatch(name):
            unread.append(checkpoint.stored_name(name))
    if unread:
        names = ", ".join(unread[:_SHOWN]) + (" .." if len(unread) > _SHOWN else "")
        count = f"{len(unread)} tensors" if len(unread) > 1 else "a tensor"
        raise ModelFileError(
            f"the model has {count} that the architecture '{architecture}' does not read: {names}; without "
            f"{'them' if len(unread) > 1 else 'it'}, the answers would be wrong. The file may state a wrong "
            "architecture or number of layers: convert the original model again, or use another file of the model",
            advice="",
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory sizes and dimensions of a model before its weights are loaded."""

    weights: int  # bytes of the weights in the format of the kernels
    loading: int  # peak bytes during loading, without `weights`
    page: int  # bytes of K and V of one KV page in all layers
    state: int  # bytes of the recurrent state of one sequence
    hidden: int  # width of the residual stream
    widest: int  # largest number of values per row that a matrix product reads and writes, without the output head
    largest_page: int  # bytes of K and V of one KV page in the layer with the largest pages
    shapes: tuple[AttentionShape, ...]  # the different shapes of the attention layers
    sinks: int  # number of heads with an attention sink in one layer
    vocab_size: int  # number of logits per row
    context: int  # number of positions that the model was trained for
    window_page: int = 0  # part of `page` that belongs to layers with a sliding window, in bytes
    window: int = 0  # largest sliding window of the layers, in positions; 0 without such layers


def estimate_memory(
    checkpoint: Checkpoint,
    architecture: Callable[[dict[str, Any], Loader], Decoder],
    config: dict[str, Any],
    ops: Ops,
    policy: QuantPolicy,
    stage: Stage = WHOLE_MODEL,
) -> MemoryEstimate:
    """Return the memory that a model needs with `ops`, without reading weights.

    Raises:
        ModelFileError: the model cannot be built, or does not read all tensors of the checkpoint.
    """
    sizes = WeightSizes(checkpoint, ops, policy, stage)
    model = architecture(config, sizes)
    kind = str(checkpoint.config.get("model_type"))
    require_all_read(checkpoint, sizes.read, stage, model.settings.layers, kind, model.unneeded)
    mixers = [block.mixer for block in model.blocks]
    settings = model.settings
    windows = model.windows()
    return MemoryEstimate(
        weights=sizes.allocated,
        loading=sizes.peak - sizes.allocated,
        page=sum(mixer.page_bytes for mixer in mixers),
        state=sum(mixer.state_bytes for mixer in mixers),
        hidden=settings.hidden,
        widest=sizes.widest,
        largest_page=max(mixer.page_bytes for mixer in mixers),
        shapes=model.attention_shapes(),
        sinks=settings.heads if any(name.endswith(".sinks") for name in checkpoint.names()) else 0,
        vocab_size=model.vocab_size,
        context=settings.context,
        window_page=sum(mixer.page_bytes for mixer, window in zip(mixers, windows, strict=True) if window),
        window=max((window for window in windows if window), default=0),
    )


@dataclass(frozen=True, eq=False)
class _Matrix:
    """Placeholder for a weight matrix: a size without contents."""

    weight: Weight  # the weight from which the matrix would be made, as a tensor on torch's meta device
    nbytes: int  # bytes that the matrix would need


class WeightSizes(Loader):
    """A loader that reads no weights and counts the bytes that loading would allocate.

    Attributes:
        allocated: bytes that loading would have allocated and not freed so far.
        peak: maximum memory during loading so far, including temporary arrays.
        widest: largest number of values per row that a matrix product so far reads and writes, without the output head.
        read: names of the tensors that loading would have read so far.
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops, policy: QuantPolicy, stage: Stage) -> None:
        super().__init__(checkpoint, ops, lambda done: None, policy=policy, stage=stage)
        self.allocated = self.peak = self.widest = 0
        self.read: set[str] = set()
        self._quantization = policy
        self._embedding: Embedding | None = None

    def transposed(self, name: str, key: str, shape: tuple[int, int], rows: RowRange) -> _Matrix:
        """Count a transposed matrix in the kernels' format, and return a placeholder."""
        self.read.add(name)
        require_shape(name, self.checkpoint.shape(name), shape)
        stored = self.checkpoint.on_meta(name, (len(rows), shape[1]))
        require_floats(name, stored)
        plain = tensors.empty((shape[1], len(rows)), dtype=tensors.float32, device="meta")
        return self._matrix(key, plain, stored.nbytes + plain.nbytes)

    def prepared(
        self,
        key: str,
        shape: tuple[int, ...],
        read: Callable[[], Weight],
        ranges: Sequence[RowRange] = (),
        columns: RowRange | None = None,
    ) -> _Matrix:
        """Count a weight matrix in the kernels' format, and return a placeholder."""
        name = key.partition("#")[0]
        self.read.add(name)
        weight = self.checkpoint.on_meta(name, own_part(shape, ranges, columns))
        require_floats(name, weight)
        return self._matrix(key, weight, weight.nbytes)

    def _matrix(self, key: str, weight: Weight, transient_bytes: int) -> _Matrix:
        """Count a weight and `transient_bytes` that are allocated while it is read."""
        quant_format = self._quantization.format_of(key, weight.shape[-1])
        if quant_format is not None and isinstance(weight, Tensor):
            weight = quantize(weight, quant_format) or weight
            transient_bytes += weight.nbytes
        matrix = _Matrix(weight, self.ops.matrix_bytes(weight))
        self._take(matrix.nbytes, transient_bytes)
        return matrix

    def plain(self, name: str, shape: tuple[int, ...], ranges: Sequence[RowRange] = ()) -> Tensor:
        """Count the bytes of a tensor that kernels use unchanged; return a placeholder."""
        self.read.add(name)
        require_shape(name, self.checkpoint.shape(name), shape)
        require_floats(name, self.checkpoint.on_meta(name, shape))
        # One number that is expanded to the whole shape needs almost no memory.
        ones = tensors.ones((), device=self.ops.device).expand(own_part(shape, ranges))
        self._take(ones.nbytes)
        return ones

    def embedding(self, name: str, width: int) -> Embedding:
        """Return the embedding layer. Its matrix stays allocated if a product copies it."""
        self._embedding = super().embedding(name, width)
        return self._embedding

    def head(self, *arguments: Any, **options: Any) -> LinearOp:
        """Count the bytes of the output head, but leave `widest` unchanged.

        `memory_request` counts the logits, which are the outputs of the head.
        """
        widest = self.widest
        head = super().head(*arguments, **options)
        self.widest = widest
        return head

    def product(self, matrices: Sequence[_Matrix], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Count a product with concatenated matrices; return a placeholder function."""
        self.widest = max(self.widest, _outputs(matrices) + matrices[0].weight.shape[1])
        self._multiply(matrices)
        return lambda x: x

    def head_linear(self, matrices: Sequence[_Matrix]) -> HeadLinearOp:
        """Count a product with a matrix per head; return a placeholder function."""
        self.widest = max(self.widest, len(matrices) * sum(matrices[0].weight.shape))
        if self._take(*self.ops.head_linear_bytes([matrix.weight for matrix in matrices])):
            self.allocated -= sum(matrix.nbytes for matrix in matrices)
        return lambda x, first=0: x

    def gather_outputs(self, product: LinearOp, shares: Shares) -> LinearOp:
        """Count the outputs of all ranks in `widest`; return `product` unchanged."""
        self.widest = max(self.widest, shares.total)
        return product

    def sum_over_ranks(self, product: Callable[..., Tensor], outputs: int) -> Callable[..., Tensor]:
        """Count the partial results of all ranks in `widest`; return `product` unchanged."""
        # The partial results are gathered before they are added.
        self.widest = max(self.widest, self.ranks * outputs)
        return product

    def mixture(
        self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None, shares: ExpertShares | None, act: str
    ) -> MixtureOp:
        """Count a mixture of experts; return a placeholder function for it."""
        gate_ups, downs = (
            [matrix for expert in experts for matrix in expert.gate_up],
            [expert.down for expert in experts],
        )
        # Each row passes through `routing.top_k` experts at the same time.
        self.widest = max(self.widest, routing.top_k * (_outputs(experts[0].gate_up) + _outputs(downs[:1])))
        self._multiply(gate_ups, downs)
        return lambda x, scores: x

    def _multiply(self, *products: Sequence[_Matrix]) -> None:
        """Count the bytes of matrix products."""
        copied = [parts for parts in products if self._take(*self.ops.product_bytes([part.weight for part in parts]))]
        embedding_matrix = None if self._embedding is None else self._embedding.matrix
        # A matrix that a product copies is freed. The embedding still reads its own matrix.
        self.allocated -= sum(part.nbytes for parts in copied for part in parts if part is not embedding_matrix)

    def _take(self, size: int, temporary: int = 0) -> int:
        """Count `size` allocated and `temporary` short-lived bytes, and return `size`."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated + temporary)
        return size


def _outputs(parts: Sequence[_Matrix]) -> int:
    return sum(part.weight.shape[0] for part in parts)
