"""The loader, which reads the tensors of a checkpoint and builds the layers of a model from them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.embedding import Embedding
from helexa.neuron.layers.rank_results import GatheredInputs, GatheredLinear, SummedOverRanks
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

_SUPPRESSED = -1e4  # within the range of float16; a request's `logit_bias` and temperature cannot compensate it


class Loader:
    """Builds the layers of a model from the tensors of a checkpoint.

    The loader rejects a tensor whose shape differs from the shape that the configuration implies, because native
    kernels access memory by the configured sizes without further checks.

    If several ranks compute the model together (see `ops.ranks`), each rank loads only its own rows or columns of most
    matrices. The arguments `ranges` (of rows) and `columns` of several methods select them; without these arguments, a
    method returns the whole tensor.

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
            part: rows and columns to read.

        Raises:
            ModelFileError: the tensor is missing, or its shape is not `shape`.
        """
        require_shape(name, self.checkpoint.shape(name), shape)
        weight = self.checkpoint.read(name, index, part)
        self._read += _nbytes(weight)
        heartbeat.beat()
        self._on_read(min(self._read, self.checkpoint.total_bytes))  # fp8 weights are larger in memory than in the file
        return weight

    def input_block(self, key: str, inputs: int) -> int:
        """Return the number of adjacent columns of a matrix that a division of the columns must not cut.

        It is the size of a quantization block in the checkpoint, or in the format that the policy chooses.

        Args:
            key: name of the matrix in the checkpoint, with the suffix `#7` for matrix 7 of a stack.
            inputs: number of columns of the matrix.
        """
        block = self.checkpoint.column_block(key.partition("#")[0])
        form = None if self._policy is None else self._policy.form(key, inputs)
        return block if form is None or block > 1 else form.stretch or form.group_size

    def sums(self, key: str, inputs: Shares) -> bool:
        """Return whether each rank multiplies its own inputs of a matrix, so that partial results must be added.

        Otherwise each rank computes its own outputs from the inputs of all ranks. This is so in exact mode, and if the
        division of the inputs would cut a quantization block of the matrix.

        Args:
            key: name of the matrix, as for `input_block`.
            inputs: division of the inputs among the ranks.
        """
        if not self.ops.ranks.sums:
            return False
        block = self.input_block(key, inputs.total)
        return all(columns.start % block == 0 for columns in inputs.ranges)

    def input_shares(self, key: str, total: int) -> Shares:
        """Return the division of `total` inputs of a matrix among the ranks.

        The shares are whole quantization blocks of the matrix if partial results may be added and if there are enough
        blocks for all ranks.

        Args:
            key: name of the matrix, as for `input_block`.
        """
        if self.ops.ranks.sums:
            unit = math.lcm(LANES, self.input_block(key, total))
            shares = Shares.split(total, self.ranks, self.ops.ranks.rank, unit)
            if all(map(len, shares.ranges)):
                return shares
        return self.shares(total)

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
        self,
        name: str,
        shape: tuple[int, ...],
        index: int | None = None,
        ranges: Sequence[RowRange] = (),
        columns: RowRange | None = None,
    ) -> Any:
        """Return a matrix [N, K], or a part of it, prepared for the kernels.

        For `name`, `shape` and `index`, see `weight`.

        Args:
            ranges: ranges of the rows to return; empty for all rows.
            columns: range of the columns to return; None for all columns.
        """
        require_shape(name, self.checkpoint.shape(name), shape)
        key = name if index is None else f"{name}#{index}"
        part = part_of(ranges, columns)
        return self.prepared(key, shape[-2:], lambda: self.weight(name, shape, index, part), ranges, columns)

    def prepared(
        self,
        key: str,
        shape: tuple[int, ...],
        read: Callable[[], Weight],
        ranges: Sequence[RowRange] = (),
        columns: RowRange | None = None,
    ) -> Any:
        """Return a matrix, or a part of it, quantized by the policy and prepared for the kernels.

        Args:
            key: unique name of the matrix in the model.
            shape: shape of the whole matrix, [N, K].
            read: function that reads the matrix, or the part of it, from the checkpoint. It is not called if the disk
                cache `store` contains the prepared matrix.
        """
        own_shape, own_key = own_part(shape, ranges, columns), _own_key(key, ranges, columns)
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

    def reduced_linear(self, name: str, outputs: int, inputs: Shares, gate: str | None = None) -> LinearOp:
        """Return a linear layer with the weight `name.weight` [outputs, inputs] and the bias `name.bias`, if it exists.

        Each rank passes the inputs that it has computed itself, and gets all outputs.

        Args:
            inputs: division of the inputs among the ranks.
            gate: activation of a gated input, `silu` or `gelu_tanh`; None for no gate. With a gate, the layer takes
                rows of twice as many numbers, and multiplies the weight by `gate(first half) * second half`.
        """
        if self.sums(f"{name}.weight", inputs):
            whole = RowRange(0, outputs, outputs)
            matrices, bias = self.matrices({name: (whole,)}, inputs.total, inputs.own)
            return self.summed(self.product(matrices, self.added_once(bias), gate), outputs)
        shares = self.shares(outputs)
        matrices, bias = self.matrices({name: (shares.own,)}, inputs.total)
        if self.ranks == 1:
            return self.product(matrices, bias, gate)
        return GatheredInputs(self.ops, self.gathered(self.product(matrices, bias), shares), inputs, gate)

    def replicated_linear(self, name: str, outputs: int, inputs: int) -> LinearOp:
        """Return a linear layer of which every rank computes all outputs. Used for layers with few outputs.

        The weight is `name.weight` [outputs, inputs], the optional bias is `name.bias`. Each rank passes all inputs.
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

    def summed(self, product: Callable[..., Tensor], outputs: int) -> Callable[..., Tensor]:
        """Return the operator whose result is the sum of the results [T, outputs] of all ranks."""
        return SummedOverRanks(self.ops, product)

    def added_once(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias of an operator whose results are added over the ranks: None on all ranks except rank 0."""
        return bias if self.ops.ranks.rank == 0 else None

    def product(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return a linear operator for `matrices`, which are already prepared for the kernels (see `Ops.linear`)."""
        return self.ops.linear(matrices, bias, gate)

    def mixture(
        self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None, shares: ExpertShares | None
    ) -> MixtureOp:
        """Return the operator of a mixture of experts (see `Ops.mixture`)."""
        return self.ops.mixture(experts, routing, clamp, shares)

    def matrices(
        self, outputs: Mapping[str, Sequence[RowRange]], inputs: int, columns: RowRange | None = None
    ) -> tuple[list[Any], Tensor | None]:
        """Read the matrices and biases of a linear layer. Return the matrices, and the concatenated biases or None.

        A matrix without a bias in the checkpoint gets a bias of zeros if another matrix has a bias.

        Args:
            outputs: for each matrix, its name and the ranges of the rows to return. The matrix is the tensor
                `name.weight`, and its bias is `name.bias`.
            inputs: number of columns of each matrix.
            columns: range of the columns to return; None for all columns.
        """
        matrices = [
            self.matrix(f"{name}.weight", (ranges[0].total, inputs), ranges=ranges, columns=columns)
            for name, ranges in outputs.items()
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

    def head(
        self, name: str, embedding: Embedding, tied: bool, inputs: int, suppressed: Sequence[int] = ()
    ) -> LinearOp:
        """Return the output head, a linear layer that computes one logit for each token of the vocabulary.

        Args:
            name: name of the head. The checkpoint has `name.weight` [vocabulary, inputs] and optionally `name.bias`.
            embedding: the token embedding.
            tied: whether the head uses the weight of `embedding` instead of `name.weight`. A tied head has no bias.
            inputs: hidden size.
            suppressed: tokens whose logits are so low that no sampling parameters can select them.
        """
        shares = embedding.shares
        matrices, bias = ([embedding.matrix], None) if tied else self.matrices({name: (shares.own,)}, inputs)
        own = [token - shares.own.start for token in suppressed if shares.own.start <= token < shares.own.stop]
        if own:
            bias = torch.zeros(len(shares.own), device=self.ops.device) if bias is None else bias
            bias[own] = _SUPPRESSED
        return self.gathered(self.product(matrices, bias), shares)


def require_shape(name: str, actual: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise a ModelFileError if the shape `actual` of the tensor `name` differs from the required `shape`."""
    if actual != shape:
        raise ModelFileError(f"tensor {name} has shape {list(actual)}, but the configuration requires {list(shape)}")


def own_part(shape: tuple[int, ...], ranges: Sequence[RowRange], columns: RowRange | None = None) -> tuple[int, ...]:
    """Return the shape of a part of a tensor. `shape` is the shape of the whole tensor."""
    rows = sum(map(len, ranges)) if ranges else shape[0]
    return (rows, *shape[1:]) if columns is None else (rows, *shape[1:-1], len(columns))


def _own_key(key: str, ranges: Sequence[RowRange], columns: RowRange | None) -> str:
    """Return the name under which the disk cache stores a part of the matrix `key`."""
    if not all(rows.whole for rows in ranges):
        key += f"#{','.join(f'{rows.start}-{rows.stop}' for rows in ranges)}"
    return key if columns is None or columns.whole else f"{key}#columns {columns.start}-{columns.stop}"


def _nbytes(weight: Weight) -> int:
    if isinstance(weight, GroupwiseTensor):
        return weight.codes.numel() * weight.bits // 8
    return weight.nbytes
