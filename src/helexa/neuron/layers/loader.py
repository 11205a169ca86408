"""The loader: builds the layers of a model from the tensors of a checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.layers.parallel import Embedding, GatheredInputs, GatheredLinear, SummedOverRanks
from helexa.neuron.layers.stage import WHOLE_MODEL, Stage
from helexa.neuron.ops.dense_ops import MatrixStore
from helexa.neuron.ops.expert_routing_and_mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import LANES
from helexa.neuron.ops.linear_and_norm_operators import HeadLinearOp, LinearOp, NormOp
from helexa.neuron.ops.rank_group_and_shares import HeadShares, RowRange, Shares, part_of
from helexa.neuron.processes import heartbeat
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.checkpoint import Checkpoint
from helexa.neuron.weights.model_file import WHOLE, Part
from helexa.neuron.weights.quantization_formats import QuantPolicy
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight

# Logit of suppressed tokens. It fits in float16, and a request's `logit_bias` and temperature cannot compensate it.
_SUPPRESSED = -1e4


class Loader:
    """Builds the layers of a model from the tensors of a checkpoint.

    The loader rejects a tensor whose shape differs from the shape that the configuration implies.

    If several ranks compute the model together (see `ops.ranks`), each rank loads only its own part of most matrices.
    The argument `ranges` of the methods states the rows of this part (empty for all rows), and `columns` its columns
    (None for all columns).
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
        self.stage = stage  # the decoder layers to load
        self.ops = ops
        self.ranks = ops.ranks.count
        self._names = frozenset(checkpoint.names())
        # disk cache of the matrices that an earlier start prepared for the kernels
        self._store = store or MatrixStore()
        # rule that chooses which matrices to quantize, and to which format; None for no quantization
        self._policy = policy
        # function that is called after each read with the number of bytes of weights read so far
        self._on_read = on_read
        self._read = 0
        self.matrix_bytes = 0  # total bytes of the matrices that this loader has returned
        self.head_matrices: Sequence[Any] = ()  # the matrices of the output head, which a draft head shares
        self.looked_up: list[Any] = []  # the matrices of which a step reads single rows: embeddings, except tied ones

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def weight(self, name: str, shape: tuple[int, ...], index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return a tensor as the checkpoint stores it: plain or groupwise quantized.

        The result may be a view of the memory-mapped file (see `Checkpoint`). To use the tensor after the load, the
        caller must copy it.

        Args:
            shape: shape that the whole tensor must have.
            index: index of one matrix in a tensor [E, outputs, inputs] of E stacked matrices; None for the whole
                tensor.
            part: rows and columns to read.

        Raises:
            ModelFileError: the tensor is missing or cannot be read, or its shape is not `shape`.
        """
        require_shape(name, self.checkpoint.shape(name), shape)
        weight = self.checkpoint.read(name, index, part)
        self._read += _nbytes(weight)
        # Report progress, because the server kills a process that reports none.
        heartbeat.beat()
        self._on_read(min(self._read, self.checkpoint.total_bytes))  # fp8 weights are larger in memory than in the file
        return weight

    def input_block(self, key: str, inputs: int) -> int:
        """Return how many adjacent columns of a matrix must stay on one rank.

        Args:
            key: name of the matrix in the checkpoint, with the suffix `#7` for matrix 7 of a stack.
            inputs: number of columns of the matrix.
        """
        block = self.checkpoint.column_block(key.partition("#")[0])
        quant_format = None if self._policy is None else self._policy.format_of(key, inputs)
        # These columns are a quantization block of the checkpoint, or of the format that the policy chooses.
        return block if quant_format is None or block > 1 else quant_format.stretch or quant_format.group_size

    def adds_results(self, key: str, inputs: Shares) -> bool:
        """Return whether a matrix is row-parallel if its columns are divided as `inputs`.

        If so, ranks add partial results. If not, each rank needs the inputs of all ranks. `key`: see `input_block`.
        """
        if not self.ops.ranks.adds_results:
            return False
        # A rank cannot multiply a part of a quantization block.
        block = self.input_block(key, inputs.total)
        return all(columns.start % block == 0 for columns in inputs.ranges)

    def input_shares(self, key: str, total: int) -> Shares:
        """Return the division of `total` inputs of the matrix `key` (see `input_block`)."""
        if self.ops.ranks.adds_results:
            # Each rank gets whole quantization blocks, so that `adds_results` is True. If a rank would get no block,
            # the ranks divide the inputs in smaller blocks.
            unit = math.lcm(LANES, self.input_block(key, total))
            shares = Shares.split(total, self.ranks, self.ops.ranks.rank, unit)
            if all(map(len, shares.ranges)):
                return shares
        return self.shares(total)

    def shares(self, total: int) -> Shares:
        """Return the division of `total` rows among the ranks, in blocks of `LANES`.

        Raises:
            ModelFileError: there are more ranks than blocks of rows.
        """
        # The kernels compute tiles of `LANES` rows, so each tile must belong to one rank.
        shares = Shares.split(total, self.ranks, self.ops.ranks.rank, LANES)
        if not all(map(len, shares.ranges)):
            raise ModelFileError(
                f"a weight matrix has {total} rows, too few for {self.ranks} ranks with at least {LANES} rows each",
                advice="set a smaller tensor_parallel",
            )
        return shares

    def head_shares(self, heads: int, kv_heads: int) -> HeadShares:
        """Return the division of attention heads among the ranks (see `HeadShares.split`)."""
        return HeadShares.split(heads, kv_heads, self.ranks, self.ops.ranks.rank)

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        index: int | None = None,
        ranges: Sequence[RowRange] = (),
        columns: RowRange | None = None,
    ) -> Any:
        """Return matrix `name` [outputs, inputs], or a part of it, for the kernels.

        `shape` and `index` are as for `weight`. The result is as for `prepared`.
        """
        require_shape(name, self.checkpoint.shape(name), shape)
        key = name if index is None else f"{name}#{index}"
        part = part_of(ranges, columns)
        return self.prepared(key, shape[-2:], lambda: self.weight(name, shape, index, part), ranges, columns)

    def transposed(self, name: str, key: str, shape: tuple[int, int], rows: RowRange) -> Any:
        """Return the transpose of the rows `rows` of a matrix [outputs, inputs].

        The result is prepared for the kernels. `key` is its unique name, by which the policy chooses a format.
        """

        def read() -> Weight:
            weight = self.weight(name, shape, part=part_of((rows,)))
            # A block of quantized numbers is a part of a row, so it cannot be transposed.
            plain = weight.dequantize(tensors.float32) if isinstance(weight, GroupwiseTensor) else weight
            return plain.T.contiguous()

        return self.prepared(key, (shape[1], len(rows)), read)

    def prepared(
        self,
        key: str,
        shape: tuple[int, ...],
        read: Callable[[], Weight],
        ranges: Sequence[RowRange] = (),
        columns: RowRange | None = None,
    ) -> Any:
        """Return a matrix or a part of it, prepared for the kernels (see `Ops.matrix`).

        Args:
            key: unique name of the matrix in the model, by which the policy chooses a format.
            shape: shape of the whole matrix, [outputs, inputs].
            read: function that reads the matrix, or the part of it, from the checkpoint. It is not called if the disk
                cache has the matrix.
        """
        own_shape, own_key = own_part(shape, ranges, columns), _own_key(key, ranges, columns)
        stored = self._store.get(own_key, own_shape)
        # The disk cache has the matrix, so `read` is not called.
        if stored is not None:
            self.matrix_bytes += stored.nbytes
            return stored
        weight = read()
        require_shape(key, tuple(weight.shape), own_shape)
        matrix = self.ops.matrix(weight, None if self._policy is None else self._policy.format_of(key, shape[-1]))
        heartbeat.beat()
        if isinstance(weight, Tensor) and matrix is weight:
            matrix = weight.clone()  # `weight` may be a view of the memory-mapped file, which is closed after the load
        self._store.add(own_key, matrix)
        self.matrix_bytes += matrix.nbytes
        return matrix

    def plain(self, name: str, shape: tuple[int, ...], ranges: Sequence[RowRange] = ()) -> Tensor:
        """Return a small tensor, such as a norm or a bias, in float32 on the device."""
        weight = self.weight(name, shape, part=part_of(ranges))
        if isinstance(weight, GroupwiseTensor):
            return weight.dequantize(tensors.float32).to(self.ops.device)
        # The result is a copy, because the memory-mapped file is closed after the load.
        return weight.to(self.ops.device, tensors.float32, copy=True)

    def vector(self, name: str, width: int, ranges: Sequence[RowRange] = ()) -> Tensor:
        """Return a tensor [width], or its elements in `ranges`, as float32 on the device."""
        return self.plain(name, (width,), ranges)

    def norm(self, name: str, width: int, eps: float, offset: float = 0.0, factor: float = 1.0) -> NormOp:
        """Return an RMS norm with the weight `name.weight` [width].

        `offset` is added to the stored weight; it is 1 for models such as Gemma, which store the weight minus 1. The
        output of the norm is multiplied by `factor`.
        """
        return self.ops.rms_norm((self.vector(f"{name}.weight", width) + offset) * factor, eps)

    def row_parallel_linear(self, name: str, outputs: int, inputs: Shares, gate: str | None = None) -> LinearOp:
        """Return a row-parallel linear layer: `name.weight` [outputs, inputs].

        Each rank passes the inputs that it has computed itself, and gets all outputs. The bias `name.bias` is optional.
        With an activation `gate`, the layer takes rows of twice as many numbers (see `Ops.linear`).
        """
        if self.adds_results(f"{name}.weight", inputs):
            whole = RowRange(0, outputs, outputs)
            matrices, bias = self.matrices({name: (whole,)}, inputs.total, inputs.own)
            return self.sum_over_ranks(self.product(matrices, self.added_once(bias), gate), outputs)
        shares = self.shares(outputs)
        matrices, bias = self.matrices({name: (shares.own,)}, inputs.total)
        if self.ranks == 1:
            return self.product(matrices, bias, gate)
        # The ranks gather the inputs, so that one rank computes each sum, in the same order as with a single rank.
        return GatheredInputs(self.ops, self.gather_outputs(self.product(matrices, bias), shares), inputs, gate)

    def replicated_linear(self, name: str, outputs: int, inputs: int) -> LinearOp:
        """Return a linear layer with few outputs, all of which every rank computes."""
        # An exchange between the ranks would take longer than the product.
        return self.product(*self.matrices({name: (RowRange(0, outputs, outputs),)}, inputs))

    def column_parallel_linear(self, outputs: Mapping[str, RowRange], inputs: int) -> LinearOp:
        """Return a column-parallel linear layer of several concatenated weights.

        The outputs of the ranks are not gathered.

        Args:
            outputs: for each weight, its name and the range of its rows on this rank. The tensor `name.weight` has the
                shape [total, inputs], with `total` from the range. The bias `name.bias` is optional.
        """
        return self.product(*self.matrices({name: (rows,) for name, rows in outputs.items()}, inputs))

    def fused_linear(self, fused: str, outputs: Mapping[str, RowRange], inputs: int) -> LinearOp:
        """Return a column-parallel linear layer whose weights may be one tensor.

        If the checkpoint has a tensor `fused.weight`, it contains the rows of all weights in the order of `outputs`.
        """
        if f"{fused}.weight" not in self:
            return self.column_parallel_linear(outputs, inputs)
        total, ranges, offset = sum(rows.total for rows in outputs.values()), [], 0
        for rows in outputs.values():
            ranges.append(rows.times(1, offset, total))
            offset += rows.total
        return self.product(*self.matrices({fused: ranges}, inputs))

    def gather_outputs(self, product: LinearOp, shares: Shares) -> LinearOp:
        """Return `product`, followed by an all-gather if there are several ranks."""
        return product if self.ranks == 1 else GatheredLinear(self.ops, product, shares)

    def sum_over_ranks(self, product: Callable[..., Tensor], outputs: int) -> Callable[..., Tensor]:
        """Return `product`, followed by a sum of its [rows, outputs] over all ranks."""
        return SummedOverRanks(self.ops, product)

    def added_once(self, bias: Tensor | None) -> Tensor | None:
        """Return `bias` on rank 0, else None, so that the sum over ranks adds it once."""
        return bias if self.ops.ranks.rank == 0 else None

    def product(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return a linear operator for prepared `matrices` (see `Ops.linear`)."""
        return self.ops.linear(matrices, bias, gate)

    def head_linear(self, matrices: Sequence[Any]) -> HeadLinearOp:
        """Return an operator that multiplies heads by `matrices` (see `Ops.head_linear`)."""
        return self.ops.head_linear(matrices)

    def mixture(
        self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None, shares: ExpertShares | None, act: str
    ) -> MixtureOp:
        """Return the operator of a mixture of experts (see `Ops.mixture`)."""
        return self.ops.mixture(experts, routing, clamp, shares, act)

    def matrices(
        self, outputs: Mapping[str, Sequence[RowRange]], inputs: int, columns: RowRange | None = None
    ) -> tuple[list[Any], Tensor | None]:
        """Return the matrices of a linear layer, and their concatenated biases.

        The biases are None if no matrix has a bias.

        Args:
            outputs: for each matrix, its name and the ranges of the rows to return. The tensor is `name.weight`, its
                bias `name.bias`.
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
        # The biases are one vector, so a matrix without a bias gets zeros.
        if any(vector is not None for vector in biases):
            widths = zip((sum(map(len, ranges)) for ranges in outputs.values()), biases, strict=True)
            bias = tensors.cat(
                [tensors.zeros(width, device=self.ops.device) if vector is None else vector for width, vector in widths]
            )
        return matrices, bias

    def vocab_size(self, name: str) -> int:
        """Return the number of rows of `name.weight`, an embedding, without reading it."""
        return self.checkpoint.shape(f"{name}.weight")[0]

    def embedding(self, name: str, width: int) -> Embedding:
        """Return the token embedding with the weight `name.weight`, [vocabulary, width]."""
        vocab_size = self.vocab_size(name)
        shares = self.shares(vocab_size)
        matrix = self.matrix(f"{name}.weight", (vocab_size, width), ranges=(shares.own,))
        self.looked_up.append(matrix)
        return Embedding(self.ops, matrix, shares)

    def head(
        self,
        name: str,
        embedding: Embedding,
        tied: bool,
        inputs: int,
        suppressed: Sequence[int] = (),
        cap: float | None = None,
    ) -> LinearOp:
        """Return the output head: a linear layer with one logit per token.

        Args:
            name: name of the head. The checkpoint has `name.weight` [vocabulary, inputs] and optionally `name.bias`.
            tied: whether the head uses the weight of `embedding` instead of `name.weight`. A tied head has no bias.
            suppressed: tokens whose logits the head makes so low that no sampling parameters can select the tokens.
            cap: soft cap of the other logits (see `Ops.soft_cap`); None for no cap.
        """
        shares = embedding.shares
        matrices, bias = ([embedding.matrix], None) if tied else self.matrices({name: (shares.own,)}, inputs)
        self.head_matrices = matrices
        self.looked_up = [matrix for matrix in self.looked_up if matrix is not matrices[0]]
        own = [token - shares.own.start for token in suppressed if shares.own.start <= token < shares.own.stop]
        if cap is None:
            return self.gather_outputs(self.product(matrices, self._suppress(own, bias, len(shares.own))), shares)
        product, suppression = self.product(matrices, bias), self._suppress(own, None, len(shares.own))
        # The low numbers for suppressed tokens are added after the cap, because the cap would raise them to -cap.
        return self.gather_outputs(lambda x: self.ops.soft_cap(product(x), cap, suppression), shares)

    def _suppress(self, tokens: Sequence[int], bias: Tensor | None, width: int) -> Tensor | None:
        """Return `bias` [width], very low for `tokens`; None without bias and tokens."""
        if not tokens:
            return bias
        lowered = tensors.zeros(width, device=self.ops.device) if bias is None else bias
        lowered[tokens] = _SUPPRESSED
        return lowered


def require_shape(name: str, actual: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise a ModelFileError unless the tensor `name` has the shape `shape`."""
    # Native kernels access memory by the configured sizes without further checks.
    if actual != shape:
        raise ModelFileError(f"tensor {name} has shape {list(actual)}, but the configuration requires {list(shape)}")


def own_part(shape: tuple[int, ...], ranges: Sequence[RowRange], columns: RowRange | None = None) -> tuple[int, ...]:
    """Return the shape of the part `ranges` x `columns` of a tensor of shape `shape`."""
    if not shape:
        return ()
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
