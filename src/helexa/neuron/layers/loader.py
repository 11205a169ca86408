"""The loader, which reads the tensors of a checkpoint and builds the layers of a model from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.embedding import Embedding
from helexa.neuron.layers.gathered_linear import GatheredLinear
from helexa.neuron.layers.stage import WHOLE_MODEL, Stage
from helexa.neuron.ops.constants import LANES
from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.norm import NormOp
from helexa.neuron.ops.protocol import MatrixStore, Ops
from helexa.neuron.ops.ranks.shares import HeadShares, RowRange, Shares, part_of
from helexa.neuron.processes import heartbeat
from helexa.neuron.weights.checkpoint import Checkpoint
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.part import WHOLE, Part
from helexa.neuron.weights.quantization.quant_policy import QuantPolicy


class Loader:
    """Builds the layers of a model from the tensors of a checkpoint.

    The loader rejects a tensor whose shape differs from the shape that the configuration implies, because native
    kernels access memory by the configured sizes without further checks.

    If several ranks compute the model together (see `ops.ranks`), each rank loads only its own rows of most matrices.
    The argument `ranges` of several methods selects these rows. Without ranges, a method returns the whole tensor.

    Args:
        on_read: function that is called after each read with the number of bytes of weights read so far.
        store: disk cache of the matrices that an earlier start prepared for the kernels; None to prepare all matrices.
        policy: rule that chooses which matrices to quantize, and to which format; None for no quantization.
        stage: the decoder layers to load.

    Attributes:
        ranks: number of ranks.
        matrix_bytes: total bytes of the matrices that this loader has returned.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        on_read: Callable[[int], None],
        store: MatrixStore | None = None,
        policy: QuantPolicy | None = None,
        stage: Stage = WHOLE_MODEL,
    ) -> None:
        self.checkpoint = checkpoint
        self.stage = stage
        self.ops = ops
        self.ranks = ops.ranks.count
        self._names = frozenset(checkpoint.names())
        self._store = store
        self._policy = policy
        self._on_read = on_read
        self._read = 0
        self.matrix_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def weight(self, name: str, shape: tuple[int, ...], index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return a tensor as the checkpoint stores it: a plain tensor, or a groupwise quantized tensor.

        The result may be a view of the memory-mapped file (see `Checkpoint`). To use the tensor after the load, the
        caller must copy it.

        Args:
            shape: shape that the whole tensor must have.
            index: index of one matrix in a tensor [E, N, K] of E stacked matrices; None for the whole tensor.
            part: rows to read.

        Raises:
            ModelFileError: the tensor is missing, or its shape is not `shape`.
        """
        require_shape(name, self.checkpoint.shape(name), shape)
        weight = self.checkpoint.read(name, index, part)
        self._read += _nbytes(weight)
        heartbeat.beat()
        self._on_read(min(self._read, self.checkpoint.total_bytes))  # fp8 weights are larger in memory than in the file
        return weight

    def shares(self, total: int) -> Shares:
        """Return the division of the `total` rows of a matrix among the ranks, in blocks of `LANES` rows.

        The kernels compute tiles of `LANES` rows, so each tile belongs to one rank.

        Raises:
            ModelFileError: there are more ranks than blocks of rows.
        """
        shares = Shares.split(total, self.ranks, self.ops.ranks.rank, LANES)
        if not all(map(len, shares.ranges)):
            raise ModelFileError(f"{total} outputs in blocks of {LANES} cannot be divided among {self.ranks} ranks")
        return shares

    def head_shares(self, heads: int, kv_heads: int) -> HeadShares:
        """Return the division of attention heads among the ranks (see `HeadShares.split`).

        Raises:
            ModelFileError: `heads` is not a multiple of `kv_heads`, or there are more ranks than query heads.
        """
        return HeadShares.split(heads, kv_heads, self.ranks, self.ops.ranks.rank)

    def matrix(
        self, name: str, shape: tuple[int, ...], index: int | None = None, ranges: Sequence[RowRange] = ()
    ) -> Any:
        """Return a matrix [N, K], or its rows in `ranges`, prepared for the kernels.

        For `name`, `shape` and `index`, see `weight`.
        """
        require_shape(name, self.checkpoint.shape(name), shape)
        key = name if index is None else f"{name}#{index}"
        return self.prepared(key, shape[-2:], lambda: self.weight(name, shape, index, part_of(ranges)), ranges)

    def prepared(
        self, key: str, shape: tuple[int, ...], read: Callable[[], Weight], ranges: Sequence[RowRange] = ()
    ) -> Any:
        """Return a matrix, or its rows in `ranges`, quantized by the policy and prepared for the kernels.

        Args:
            key: unique name of the matrix in the model.
            shape: shape of the whole matrix, [N, K].
            read: function that reads the matrix, or its rows in `ranges`, from the checkpoint. It is not called if the
                disk cache `store` contains the prepared matrix.
        """
        own_shape, own_key = _own_shape(shape, ranges), _own_key(key, ranges)
        stored = None if self._store is None else self._store.get(own_key, own_shape)
        if stored is not None:
            self.matrix_bytes += stored.nbytes
            return stored
        weight = read()
        require_shape(key, tuple(weight.shape), own_shape)
        matrix = self.ops.matrix(weight, None if self._policy is None else self._policy.form(key, shape[-1]))
        heartbeat.beat()
        if isinstance(weight, Tensor) and matrix is weight:
            matrix = weight.clone()
        if self._store is not None:
            self._store.add(own_key, matrix)
        self.matrix_bytes += matrix.nbytes
        return matrix

    def plain(self, name: str, shape: tuple[int, ...], ranges: Sequence[RowRange] = ()) -> Tensor:
        """Return the tensor `name`, or its rows in `ranges`, dequantized to float32 on the device.

        Used for small tensors, such as norm weights and biases.
        """
        weight = self.weight(name, shape, part=part_of(ranges))
        if isinstance(weight, GroupwiseTensor):
            return weight.dequantize(torch.float32).to(self.ops.device)
        return weight.to(self.ops.device, torch.float32, copy=True)

    def vector(self, name: str, width: int, ranges: Sequence[RowRange] = ()) -> Tensor:
        """Return the tensor `name` of shape [width], or its elements in `ranges`, in float32 on the device."""
        return self.plain(name, (width,), ranges)

    def norm(self, name: str, width: int, eps: float, offset: float = 0.0) -> NormOp:
        """Return an RMS norm with the tensor `name.weight` of shape [width] as its weight.

        Args:
            offset: number to add to the weight. Some models, such as Gemma, store the weight minus 1.
        """
        return self.ops.rms_norm(self.vector(f"{name}.weight", width) + offset, eps)

    def linear(self, name: str, outputs: int, inputs: int, gate: str | None = None) -> LinearOp:
        """Return a linear layer with the weight `name.weight` [outputs, inputs] and the bias `name.bias`, if it exists.

        Each rank computes some of the outputs. An all-gather then returns all outputs on each rank.

        Args:
            gate: activation of a gated input, `silu` or `gelu_tanh`; None for no gate. With a gate, the layer takes
                rows of 2 * `inputs` numbers and multiplies the weight by `gate(first half) * second half`.
        """
        shares = self.shares(outputs)
        return self.gathered(self.product(*self.matrices({name: (shares.own,)}, inputs), gate), shares)

    def replicated_linear(self, name: str, outputs: int, inputs: int) -> LinearOp:
        """Return a linear layer of which every rank computes all outputs. Used for layers with few outputs.

        The weight is `name.weight` [outputs, inputs], and the optional bias is `name.bias`.
        """
        return self.product(*self.matrices({name: (RowRange(0, outputs, outputs),)}, inputs))

    def local_linear(self, outputs: Mapping[str, RowRange], inputs: int) -> LinearOp:
        """Return a linear layer that applies several weights to the same input and concatenates the outputs.

        Each rank computes only the outputs in its own ranges, and the outputs are not gathered.

        Args:
            outputs: for each weight, its name and the range of its rows on this rank. The tensor `name.weight` has the
                shape [total, inputs], with `total` from the range. The bias `name.bias` is optional.
            inputs: number of columns of each weight.
        """
        return self.product(*self.matrices({name: (rows,) for name, rows in outputs.items()}, inputs))

    def gathered(self, product: LinearOp, shares: Shares) -> LinearOp:
        """Return `product`, a linear layer that computes this rank's outputs, followed by an all-gather of the outputs.

        With a single rank, no all-gather is added.
        """
        return product if self.ranks == 1 else GatheredLinear(self.ops, product, shares)

    def product(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return a linear operator for `matrices`, which are already prepared for the kernels (see `Ops.linear`)."""
        return self.ops.linear(matrices, bias, gate)

    def mixture(
        self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None, shares: ExpertShares
    ) -> MixtureOp:
        """Return the operator of a mixture of experts (see `Ops.mixture`)."""
        return self.ops.mixture(experts, routing, clamp, shares if self.ranks > 1 else None)

    def matrices(self, outputs: Mapping[str, Sequence[RowRange]], inputs: int) -> tuple[list[Any], Tensor | None]:
        """Read the matrices and biases of a linear layer. Return the matrices, and the concatenated biases or None.

        A matrix without a bias in the checkpoint gets a bias of zeros if another matrix has a bias.

        Args:
            outputs: for each matrix, its name and the ranges of the rows to return. The matrix is the tensor
                `name.weight`, and its bias is `name.bias`.
            inputs: number of columns of each matrix.
        """
        matrices = [
            self.matrix(f"{name}.weight", (ranges[0].total, inputs), ranges=ranges) for name, ranges in outputs.items()
        ]
        biases = [
            self.vector(f"{name}.bias", ranges[0].total, ranges) if f"{name}.bias" in self else None
            for name, ranges in outputs.items()
        ]
        bias = None
        if any(vector is not None for vector in biases):
            widths = zip((sum(map(len, ranges)) for ranges in outputs.values()), biases, strict=True)
            bias = torch.cat(
                [torch.zeros(width, device=self.ops.device) if vector is None else vector for width, vector in widths]
            )
        return matrices, bias

    def vocab_size(self, name: str) -> int:
        """Return the number of tokens of the embedding with the weight `name.weight`, without loading it."""
        return self.checkpoint.shape(f"{name}.weight")[0]

    def embedding(self, name: str, width: int) -> Embedding:
        """Return the token embedding with the weight `name.weight`, [vocabulary, width].

        The vocabulary size is the number of rows of the tensor in the checkpoint. Each rank holds some of the rows.
        """
        vocab_size = self.vocab_size(name)
        shares = self.shares(vocab_size)
        matrix = self.matrix(f"{name}.weight", (vocab_size, width), ranges=(shares.own,))
        return Embedding(self.ops, matrix, shares)

    def head(self, name: str, embedding: Embedding, tied: bool, inputs: int) -> LinearOp:
        """Return the output head, a linear layer that computes one logit for each token of the vocabulary.

        Args:
            name: name of the head. The checkpoint has `name.weight` [vocabulary, inputs] and optionally `name.bias`.
            embedding: the token embedding.
            tied: whether the head uses the weight of `embedding` instead of `name.weight`. A tied head has no bias.
            inputs: hidden size.
        """
        shares = embedding.shares
        matrices, bias = ([embedding.matrix], None) if tied else self.matrices({name: (shares.own,)}, inputs)
        return self.gathered(self.product(matrices, bias), shares)


def require_shape(name: str, actual: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise a ModelFileError if the shape `actual` of the tensor `name` differs from the required `shape`."""
    if actual != shape:
        raise ModelFileError(f"tensor {name} has shape {list(actual)}, but the configuration requires {list(shape)}")


def _own_shape(shape: tuple[int, ...], ranges: Sequence[RowRange]) -> tuple[int, ...]:
    return (sum(map(len, ranges)), *shape[1:]) if ranges else shape


def _own_key(key: str, ranges: Sequence[RowRange]) -> str:
    """Return the name under which the disk cache stores the rows `ranges` of the matrix `key`."""
    if all(rows.whole for rows in ranges):
        return key
    return f"{key}#{','.join(f'{rows.start}-{rows.stop}' for rows in ranges)}"


def _nbytes(weight: Weight) -> int:
    if isinstance(weight, GroupwiseTensor):
        return weight.codes.numel() * weight.bits // 8
    return weight.nbytes
