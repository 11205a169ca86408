"""Interface of the kernel implementations, for models and the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.ops.batch import AttentionKind, Batch
from helexa.neuron.ops.convolution import ConvOp, ConvSizes, ConvWeights
from helexa.neuron.ops.gated_delta import DeltaOp, DeltaSizes, DeltaWeights
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.operators import (
    HeadLinearOp,
    HeadNorms,
    LinearOp,
    NoNorm,
    NormOp,
    ProductBytes,
    QueryTemperature,
    RmsNorm,
)
from helexa.neuron.ops.rank_group import SINGLE, Exchange, RankGroup, RowRange, Shares
from helexa.neuron.ops.sampling import Masks, Sampling
from helexa.neuron.ops.state_space import ScanOp, ScanSizes, ScanWeights
from helexa.neuron.tensors import Device, DType, Tensor
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.quant_policy import QuantFormat


class MatrixStore:
    """Disk cache of one model's weight matrices, in the layout of the kernels.

    The first start of an engine converts the matrices from the checkpoint. Later starts read the converted matrices,
    which is faster. This base class stores nothing.
    """

    def get(self, name: str, shape: tuple[int, ...]) -> Any | None:
        """Return the matrix `name`; None without a matrix of this name and shape."""
        return None

    def add(self, name: str, matrix: Any) -> None:
        """Add a matrix that was converted from the checkpoint, for `finish`."""

    def finish(self, looked_up: Sequence[Any] = ()) -> object:
        """End the load. The added matrices are written to disk in the background.

        `looked_up` are the matrices of which a step reads single rows, such as an embedding.
        """
        return None


_SAMPLING_ARRAYS = 6  # temporary arrays of the logits' size that torch's functions allocate


class Ops(ABC):
    """The kernels for one device and activation dtype; base of implementations.

    The methods `new_cache`, `page_bytes`, `rotate_store` and `attend` of one implementation use the same layout of the
    KV cache. In all layouts, the KV slot of a position is the number `page * PAGE_SIZE + offset in the page`. A method
    that "may change" an argument changes the tensor in place.

    The shapes of arguments and results contain these letters:

    * T: number of rows (tokens) in the batch. S: number of rows whose logits are needed
    * H: hidden size. I: intermediate size of a feed-forward layer. V: vocabulary size
    * N and K: rows and columns of a weight matrix, which are the outputs and inputs of a linear layer
    * D: head dimension. R: number of rotated numbers per head, at most D

    Activations have these names: `silu`, `gelu_tanh`, `gelu` (the exact GELU) and `relu2` (the square of a positive
    number, and 0 for other numbers). A gate is `silu` or `gelu_tanh`.

    The methods `..._bytes` serve the memory estimate before a model is loaded. The weights that they take may be on
    torch's meta device.
    """

    name: ClassVar[str]  # Name of the kernel implementation, shown to users

    # Whether the progress count of this process grows with each work item of a kernel.
    counts_items: ClassVar[bool] = False

    # Whether attention with a sliding window never reads pages before the window, which other sequences may use.
    skips_pages: ClassVar[bool] = False

    def __init__(
        self,
        device: Device,
        dtype: DType,
        *,
        kv_bits: int,
        quantized: bool,
        copies_matrices: bool,
        fixed_addresses: bool,
        captures_state: bool,
        copies_pages: bool,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.kv_bits = kv_bits  # bits of each number in the KV cache
        # Whether linear operators keep quantized weights quantized in memory. If False, the operators store dequantized
        # weights, which take as much memory as plain weights.
        self.quantized = quantized
        # Whether `linear` copies several matrices into one new matrix. The given matrices can then be freed.
        self.copies_matrices = copies_matrices
        # Whether kernels read all data of a batch from tensors with fixed addresses. The engine can then capture one
        # graph per bucket (batch size) in advance with `capture`.
        self.fixed_addresses = fixed_addresses
        # whether graphs can be captured for models with recurrent layers, whose state changes in each step
        self.captures_state = captures_state
        # Whether plain torch computes the attention of prompts and copies the KV pages that it reads. The memory
        # estimate includes these copies.
        self.copies_pages = copies_pages
        # Bytes of the weights that one decode step of a single sequence reads. Building the model increases the number:
        # each linear operator adds its weights, and each mixture adds the weights of as many experts as one token uses.
        self.step_bytes = 0
        # The position of this process among the ranks (processes) that compute the model together. Set before the model
        # is built.
        self.ranks: RankGroup = SINGLE
        # how this rank exchanges results with the other ranks; None before `connect`
        self.exchange: Exchange | None = None

    @property
    def activation_dtype(self) -> DType:
        """Dtype of tensors between operators, except the float32 residual stream."""
        return self.dtype

    def store(self, model: Path, quant: str = "", part: str = "") -> MatrixStore:
        """Return the disk cache of a model's converted weights, which may store nothing.

        Each quantization and each part of a model has its own cache.

        Args:
            model: path of the model's file or folder.
            quant: name of the quantization applied to plain weights.
            part: the part of the model that this process computes; empty for the whole model.
        """
        return MatrixStore()

    @abstractmethod
    def matrix(self, weight: Weight, quant_format: QuantFormat | None = None) -> Any:
        """Return a weight [N, K] in the memory layout of these kernels.

        The methods `linear`, `embedding` and `mixture` take matrices in this layout.

        Args:
            quant_format: format to quantize a plain weight to; None for no quantization. `quant_format.fits(K)` must be
                True. A weight that contains infinite, NaN or very large numbers stays plain.
        """
        ...

    @abstractmethod
    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return an operator that computes `x @ weight.T + bias` for inputs x [T, K].

        The operator concatenates the outputs of all matrices. With a gate, x is [T, 2 * K], and the operator multiplies
        `gate(first half of x) * second half of x`, [T, K], by the weights.

        Args:
            matrices: weights [N, K] from `matrix`.
            bias: float32, for the concatenated outputs.
        """
        ...

    @abstractmethod
    def head_linear(self, matrices: Sequence[Any]) -> HeadLinearOp:
        """Return an operator that multiplies each head by the head's own matrix.

        The operator takes x [T, heads, W] and the index `first` of a column, by default 0. For each head, it multiplies
        the K columns from `first` on by the head's matrix, a weight [N, K] from `matrix`, and returns [T, heads, N].
        """
        ...

    @abstractmethod
    def matrix_bytes(self, weight: Weight) -> int:
        """Return the number of bytes of the matrix that `matrix(weight)` returns.

        If `matrix()` would quantize the weight, pass the quantized weight.
        """
        ...

    @abstractmethod
    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the bytes that `linear` or `mixture` allocates besides the matrices.

        Args:
            weights: weights of one linear operator; or the gate and up weights, or the down weights, of all experts of
                a mixture.
        """
        ...

    @abstractmethod
    def head_linear_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the bytes that `head_linear` allocates besides the matrices."""
        ...

    @abstractmethod
    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        """Return T tokens' embeddings, rows of [V, H] times `factor`, float32 [T, H].

        Args:
            matrix: embedding matrix from `matrix`, or its rows in the range `rows`.
            rows: range of token ids whose embeddings `matrix` contains. Other tokens get zeros. None for the whole
                vocabulary.
        """
        ...

    @abstractmethod
    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first half) * second half` of `gate_up` [T, 2 * I], as [T, I]."""
        ...

    @abstractmethod
    def connect(self, exchange: Exchange) -> None:
        """Set how this rank exchanges results with the other ranks.

        Several ranks call this method before the first forward pass.
        """
        ...

    @abstractmethod
    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks side by side, [T, `shares.total`] (all-gather).

        All ranks must call this method in the same order and with the same T. x has the columns of this rank.
        """
        ...

    @abstractmethod
    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [T, H] over all ranks, in their order (all-reduce)."""
        ...

    @abstractmethod
    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Return an operator that computes the RMS norm with a float32 weight [H]."""
        ...

    @abstractmethod
    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        """Return a layer norm operator (Ba et al., 2016) with float32 weight and bias [H]."""
        ...

    @abstractmethod
    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation of each number of x [T, I]; may change x."""
        ...

    @abstractmethod
    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the RoPE tables cos and sin times `factor`, float32 [T, R / 2]."""
        ...

    @abstractmethod
    def rotate_store(
        self,
        qkv: Tensor,
        heads: int,
        rope: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Apply norms and RoPE to queries and keys, and write the KV cache.

        RoPE is the rotary embedding of Su et al., 2021. It rotates the first R of the D numbers of each head. Number i
        forms a pair with number i + R / 2.

        Args:
            qkv: the query heads, key heads and value heads of each row, [T, heads + 2 * kv_heads, D]; may be changed.
                With [T, heads + kv_heads, D], the key heads are also the value heads, before norm and RoPE. With [T,
                heads, D], nothing is stored: the layer reads the keys and values of another layer.
            heads: number of query heads.
            rope: cos and sin tables from `rope_tables`.
            slots: [T], KV slot of each row.

        Returns:
            The rotated queries, [T, heads, D].
        """
        ...

    def join_latent(
        self, queries: Tensor, absorbed: Tensor, latent: Tensor, norm: Tensor, eps: float, interleaved: bool
    ) -> Tensor:
        """Return `qkv` for `rotate_store` of latent attention (MLA).

        The result is [T, heads + 1, R + L]. A head of the result has R numbers that `rotate_store` rotates, and then L
        numbers of the latent space. The single key head is also the value head.

        Args:
            queries: [T, heads, W], whose last R numbers are those to rotate.
            absorbed: [T, heads, L], the queries in the latent space.
            latent: [T, L + R], the latent, and then the key's numbers to rotate.
            norm: float32 [L], weight of the RMS norm of the latent.
            interleaved: whether numbers 2i and 2i + 1 form a pair.
        """
        rank = absorbed.shape[2]
        rotated = latent.shape[1] - rank
        normed = self.rms_norm(norm, eps)(latent[:, :rank])
        pairs = tensors.cat((queries[:, :, -rotated:], latent[:, None, rank:]), dim=1)
        if interleaved:
            # `rotate_store` expects that number i forms a pair with number i + R / 2.
            pairs = pairs.unflatten(2, (rotated // 2, 2)).transpose(2, 3).flatten(2)
        return tensors.cat((pairs, tensors.cat((absorbed, normed[:, None]), dim=1)), dim=2)

    def scale_queries(self, qkv: Tensor, heads: int, positions: Tensor, temperature: QueryTemperature) -> Tensor:
        """Return `qkv` with query heads multiplied by a factor of the row's position.

        Args:
            qkv: [T, heads + 2 * kv_heads, D], as for `rotate_store`; may be changed.
            positions: int32 [T].
        """
        slope, length = temperature
        factors = 1 + slope * (1 + positions // length).float().log()
        qkv[:, :heads] *= factors[:, None, None].to(qkv.dtype)
        return qkv

    def norm_columns(self, x: Tensor, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
        """Return x [T, N] with RMS norms of its first M and of its next L columns.

        The other columns of x stay the same. x may be changed. The weights are float32 [M] and [L].
        """
        start = 0
        for weight in weights:
            stop = start + len(weight)
            x[:, start:stop] = RmsNorm(weight, eps, x.dtype)(x[:, start:stop])
            start = stop
        return x

    def without_norm(self) -> NormOp:
        """Return an operator for a sublayer whose input is not normalized.

        It adds `delta` to x as a norm does, and returns x in the activation dtype. The result may be x itself.
        """
        return NoNorm(self.activation_dtype)

    def join_queries(self, gated: Tensor, kv: Tensor) -> Tensor:
        """Return `qkv` for `rotate_store` of attention with output gates.

        Args:
            gated: [T, heads, 2, D], the query and then the gate of each head, also for `gate_heads`.
            kv: [T, 2 * kv_heads, D], the key heads and value heads.
        """
        return tensors.cat((gated[:, :, 0], kv), dim=1)

    def gate_heads(self, x: Tensor, gated: Tensor) -> Tensor:
        """Return `x * sigmoid(gate)` for x [T, heads, D], which may be changed.

        Args:
            gated: the gates [T, heads, D], or the queries and gates [T, heads, 2, D] of `join_queries`.
        """
        return x * (gated if len(gated.shape) == 3 else gated[:, :, 1]).sigmoid()

    def add_scaled(self, x: Tensor, delta: Tensor, factor: float) -> Tensor:
        """Return `(x + delta) * factor` for x [T, H] and delta [T, H], in x."""
        return x.add_(delta).mul_(factor)

    def gate_inputs(self, x: Tensor, inputs: Tensor, first: int, gate: str) -> Tensor:
        """Return `gate(x)` times the I columns of `inputs` [T, N] from `first` on, [T, I]."""
        own = inputs[:, first : first + x.shape[1]].to(x.dtype)
        return self.gate_mul(tensors.cat((x, own), dim=1), gate)

    def soft_cap(self, logits: Tensor, cap: float, bias: Tensor | None = None) -> Tensor:
        """Return `cap * tanh(logits / cap) + bias` [S, V], maybe in `logits`; bias is [V]."""
        # Infinite logits become NaN, because they are signs of an error.
        capped = (logits / cap).tanh() * cap + logits * 0
        return capped if bias is None else capped + bias.to(capped.dtype)

    @abstractmethod
    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
        act: str = "silu",
    ) -> MixtureOp:
        """Return an operator that computes a mixture of experts.

        Args:
            clamp: parameters of the clamped activation of gpt-oss; None for `act`.
            shares: division of each expert's outputs among the ranks; None if this process has the whole experts.
            act: gate of the experts. `WITHOUT_GATE` for experts that have no gate and compute `down(relu(up(x)) ** 2)`.
        """
        ...

    def state_bytes(self, sizes: DeltaSizes | ConvSizes | ScanSizes) -> int:
        """Return the bytes of one sequence's recurrent state in a layer of these sizes."""
        return sizes.state_bytes

    @abstractmethod
    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Return an operator for a Gated DeltaNet layer without its projections."""
        ...

    @abstractmethod
    def short_convolution(self, sizes: ConvSizes, weights: ConvWeights) -> ConvOp:
        """Return an operator for a gated short convolution without its projections."""
        ...

    @abstractmethod
    def scan(self, sizes: ScanSizes, weights: ScanWeights) -> ScanOp:
        """Return an operator for a Mamba-2 layer without its projections and its norm."""
        ...

    @abstractmethod
    def group_norm(self, weight: Tensor, groups: int, eps: float) -> Callable[[Tensor], Tensor]:
        """Return an operator that computes RMS norms of groups of adjacent columns.

        The operator returns the norms [T, I] of x [T, I]. Each group has I / `groups` columns. The weight is float32
        [I].
        """
        ...

    @abstractmethod
    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)`, maybe in `out`; x is [T, H], gate [T, 1]."""
        ...

    @abstractmethod
    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """Return `out + x`, maybe in `out`; both are [T, H]."""
        ...

    @abstractmethod
    def choose_rows(self, x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the S rows of x [T, H] with the indexes `rows` [S], as [S, H].

        Args:
            out: float32 [S, H], memory for the result; None for new memory.
        """
        ...

    @abstractmethod
    def sample(self, logits: Tensor, sampling: Sampling, last: Tensor | None = None) -> Tensor:
        """Sample a token for each row of logits [S, V], which stay unchanged.

        Args:
            last: int64 [N], the tokens that the previous step has sampled; None if no adjustment in `sampling` refers
                to them.

        Returns:
            int64 [S], tokens on the device. A row whose largest logit is NaN or infinite gets `NON_FINITE` (-1).
        """
        # An implementation for a GPU does not wait for the device, because the engine reads the tokens later.
        ...

    @abstractmethod
    def sample_masked(self, logits: Tensor, masks: Masks, sampling: Sampling, last: Tensor | None = None) -> list[int]:
        """Return a sampled token for each row with a mask, among its allowed tokens.

        The random numbers differ from those of `sample`, because a row that comes here has been sampled without a mask
        before.
        """
        ...

    @abstractmethod
    def log_probabilities(
        self, logits: Tensor, tokens: Tensor, alternatives: int, rows: NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of a token per row, and of the likeliest tokens.

        Temperature does not apply. If the largest logit of a row is NaN or infinite, its log-probabilities are NaN.

        Args:
            logits: [S, V], any float dtype.
            tokens: int64 [S], the token of each row of `logits`. Negative tokens have any log-probability.
            alternatives: number of likeliest tokens to return, at most V.
            rows: int32 [R], the rows to compute; None for all rows.

        Returns:
            float32 [R], the log-probability of each row's token; int64 [R, `alternatives`], the likeliest tokens, the
            likeliest first; float32 [R, `alternatives`], their log-probabilities.
        """
        ...

    @abstractmethod
    def page_bytes(self, kv_heads: int, head_dim: int, values: bool = True) -> int:
        """Return the bytes of one KV page in one layer (see `new_cache`)."""
        ...

    @abstractmethod
    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the maximum bytes of partial results of attention in a decode step.

        Attention has partial results if several thread blocks of a GPU divide the positions of one sequence, as in
        flash-decoding. A second kernel merges them.
        """
        ...

    def sampling_bytes(self, rows: int, width: int) -> int:
        """Return the maximum bytes that sampling allocates for logits [`rows`, `width`]."""
        return _SAMPLING_ARRAYS * rows * width * 4

    @abstractmethod
    def new_cache(self, kv_heads: int, pages: int, head_dim: int, values: bool = True) -> Tensor:
        """Return a zeroed KV cache with `pages` pages for one layer.

        Args:
            values: whether values differ from keys. If False, the numbers of a key that RoPE leaves unchanged are also
                the value. The other numbers of the result of `attend` are then undefined.
        """
        ...

    @abstractmethod
    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return causal attention [T, heads, D] of queries over the KV pages.

        `rotate_store` has written the keys and values of the batch's rows to the cache before.
        """
        ...

    def attend_sampled(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return causal attention [S, heads, D] of the rows `batch.sample_rows` only."""
        rows = batch.sample_rows.long()
        padded = queries.new_zeros(batch.tokens.shape[0], *queries.shape[1:])
        padded[rows] = queries
        return self.attend(padded, cache, batch, kind)[rows]

    @abstractmethod
    def attend_frames(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        """Return attention of each row to all rows of its frame, [T, heads, D].

        A frame is consecutive rows, such as the patches of an image or of a window.

        Args:
            qkv: [T, 3 * heads, D], the query heads, key heads and value heads of each row; may be changed.
            rope: cos and sin tables [T, R / 2] for queries and keys (see `rotate_store`); None for no rotation.
            lengths: number of rows of each frame. The sum is T.
            scale: factor on the products of queries and keys.
        """
        ...

    @abstractmethod
    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Run a forward pass or replay its captured graph, and return its result.

        Args:
            capture: whether the implementation may capture the pass as a graph. The operations of the pass must then
                depend only on the shape of the batch, and it must be safe to run the pass twice.
        """
        ...

    @abstractmethod
    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture the forward pass of a bucket (batch size) as a graph.

        Call this method only if `fixed_addresses` is True.

        Args:
            blank: a batch of the bucket's size that contains only padding rows.

        Raises:
            RuntimeError: the pass cannot be captured.
        """
        ...

    @abstractmethod
    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        ...
