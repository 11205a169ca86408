"""The outline of a model: what it will hold and keep, learnt by building it before a weight is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.layers.embedding import Embedding
from helexa.neuron.layers.loader import Loader, require_shape
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.cpu import CpuOps, Int4Linear
from helexa.neuron.ops.delta_rule import DeltaSizes
from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.ops.mixture import Clamp, Expert, MixtureOp, Routing
from helexa.neuron.ops.norm import NormOp, RmsNorm
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.reference import ReferenceOps
from helexa.neuron.weights.checkpoint import Checkpoint
from helexa.neuron.weights.formats import SAMPLE_ROWS, GroupwiseTensor, Weight
from helexa.neuron.weights.quant_form import QuantForm
from helexa.neuron.weights.quant_policy import QuantPolicy


@dataclass(frozen=True)
class Outline:
    """Sizes of a model, in bytes.

    Attributes:
        weights: as kernels hold them.
        loading: most that loading takes beside the weights.
        page: of K and V of one page in all layers.
        state: of what recurrent layers keep of one sequence.
        hidden, widest: numbers in a row of the residual stream, and at most in a row that goes into a product or comes
            out of it, the head apart.
        heads, kv_heads, head_dim: of attention.
        sinks: heads that have one, in a layer.
        vocab_size: numbers in a row of logits.
        layers: how many keep pages.
        context: positions that the model was trained for.
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


def outline(
    checkpoint: Checkpoint,
    architecture: Callable[[dict[str, Any], Loader], Decoder],
    config: dict[str, Any],
    ops: Ops,
    policy: QuantPolicy,
) -> Outline:
    """The outline of a model as `ops` would hold it.

    Raises:
        ModelFileError: the model cannot be built; the same that loading it would say.
    """
    sizes = _Sizes(ops)
    model = architecture(config, _Headers(checkpoint, sizes, policy))
    mixers = [block.mixer for block in model.blocks]
    settings = model.settings
    return Outline(
        weights=sizes.weights,
        loading=sizes.loading,
        page=sum(mixer.page_bytes for mixer in mixers),
        state=sum(mixer.state_bytes for mixer in mixers),
        hidden=settings.hidden,
        widest=max((width for outputs, width in sizes.widths.items() if outputs != model.vocab_size), default=0),
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
    """What stands for a matrix.

    Attributes:
        held: bytes of the matrix as kernels take it.
        product: of what a product makes of it, or 0 where it works on the matrix itself.
        loading: of what is read, until the matrix is made of it.
    """

    outputs: int
    columns: int
    held: int
    product: int
    loading: int


class _Sizes(ReferenceOps):
    """Kernels that hold nothing and count what those that they stand for would hold."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops.device, ops.dtype)
        self.kv_bits = ops.kv_bits
        self.weights = 0
        self.loading = 0
        self.widths: dict[int, int] = {}  # outputs of products -> numbers of a row before and behind them
        self._ops = ops
        self._kept: set[_Matrix] = set()
        self._samples: dict[tuple[Any, ...], tuple[float, float, float]] = {}

    def outlined(self, kind: tuple[Any, ...], sample: Callable[[], Weight], shape: tuple[int, ...]) -> _Matrix:
        """What stands for a matrix of this shape: rows like those of `sample`, which all of a `kind` have."""
        if kind not in self._samples:
            self._samples[kind] = self._measured(sample(), kind[-1])
        rows = -(-shape[0] // SAMPLE_ROWS)
        held, product, loading = (int(rows * size) for size in self._samples[kind])
        if self._ops.quantised:
            self.loading = max(self.loading, loading)
        return _Matrix(shape[0], shape[1], held, product, loading)

    def keep(self, matrix: _Matrix) -> None:
        """Count a matrix, once."""
        if matrix not in self._kept:
            self._kept.add(matrix)
            self.weights += matrix.held

    def linear(self, parts: Sequence[_Matrix], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """See `Ops`."""
        product = 0
        for part in parts:
            product += part.product
            if not part.product:
                self.keep(part)
        self.weights += product
        outputs = sum(part.outputs for part in parts)
        self.widths[outputs] = max(self.widths.get(outputs, 0), outputs + parts[0].columns)
        if self._ops.joins:  # parts, and the same side by side
            self.loading = max(self.loading, self._read(parts) + product)
        return lambda x: x

    def mixture(self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None = None) -> MixtureOp:
        """See `Ops`."""
        outputs = sum(part.outputs for part in experts[0].gate_up)
        self.widths[-outputs] = routing.chosen * (outputs + experts[0].down.outputs)
        if self._ops.joins:  # all experts of a layer are there before the first product is made
            parts = [part for expert in experts for part in (*expert.gate_up, expert.down)]
            self.loading = max(self.loading, self._read(parts))
        return super().mixture(experts, routing, clamp)

    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """See `Ops`."""
        return RmsNorm(weight, eps, self.dtype)

    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """See `Ops`."""
        return self._ops.page_bytes(kv_heads, head_dim)

    def _read(self, parts: Sequence[_Matrix]) -> int:
        """Bytes of parts that are there at a time; what is quantised is read one after another."""
        if self._ops.quantised:
            return sum(part.held for part in parts) + max(part.loading for part in parts)
        return sum(part.loading for part in parts)

    def state_bytes(self, sizes: DeltaSizes) -> int:
        """See `Ops`."""
        return self._ops.state_bytes(sizes)

    def _measured(self, sample: Weight, form: QuantForm | None) -> tuple[float, float, float]:
        """Bytes of the sample as a matrix, as a product, and as it was read."""
        before = self._ops.step_bytes
        matrix = self._ops.matrix(sample, form)
        self._ops.linear([matrix], None)
        product, self._ops.step_bytes = self._ops.step_bytes - before, before
        if self._ops.quantised:
            beside = sample.shape.numel() if self._ops.joins else 0  # its codes, before they are packed
            return matrix.nbytes, 0, _nbytes(sample) + beside
        if isinstance(matrix, Tensor) and not isinstance(self._ops, CpuOps):
            return matrix.nbytes, 0, _nbytes(sample) + matrix.nbytes
        if isinstance(self._ops, CpuOps) and isinstance(matrix, GroupwiseTensor) and Int4Linear.fits(matrix):
            product += matrix.codes.numel() * (0.5 + 4 / matrix.group_size)
        return _nbytes(matrix), product, _nbytes(sample)


class _Headers(Loader):
    """A loader that knows names, shapes and forms, and reads nothing."""

    ops: _Sizes

    def __init__(self, checkpoint: Checkpoint, ops: _Sizes, policy: QuantPolicy) -> None:
        super().__init__(checkpoint, ops, lambda done: None, None, policy)
        self._forms = policy

    def prepared(self, key: str, shape: tuple[int, ...], read: Callable[[], Weight]) -> _Matrix:
        """See `Loader`."""
        name, columns = key.partition("#")[0], shape[-1]
        form = self._forms.form(key, columns)
        kind = (self.checkpoint.kind(name), columns, form)
        return self.ops.outlined(kind, lambda: self.checkpoint.sample(name, columns), shape)

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Loader`; ones that take no memory."""
        require_shape(name, self.checkpoint.shape(name), shape)
        ones = torch.ones((), device=self.ops.device).expand(shape)
        self.ops.weights += ones.numel() * ones.itemsize
        return ones

    def embedding(self, name: str, width: int) -> Embedding:
        """See `Loader`."""
        embedding = super().embedding(name, width)
        self.ops.keep(embedding.matrix)
        return embedding


def _nbytes(weight: Weight) -> int:
    if isinstance(weight, Tensor):
        return weight.nbytes
    scales = [part for scale in (weight.scale, weight.minimum) if scale for part in (scale.unit, scale.codes)]
    return weight.codes.nbytes + sum(part.nbytes for part in scales if part is not None)
