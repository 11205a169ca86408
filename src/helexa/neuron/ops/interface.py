"""Interface of the kernel implementations, for models and the engine."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.ops.batch import AttentionKind, Batch
from helexa.neuron.ops.convolution import ConvOp, ConvSizes, ConvWeights
from helexa.neuron.ops.dense_ops import DenseOps
from helexa.neuron.ops.expert_routing_and_mixture import (
    WITHOUT_GATE,
    Clamp,
    Expert,
    ExpertShares,
    Mixture,
    MixtureOp,
    Routing,
)
from helexa.neuron.ops.gated_delta import DeltaOp, DeltaSizes, DeltaWeights
from helexa.neuron.ops.linear_and_norm_operators import HeadNorms, QueryTemperature
from helexa.neuron.ops.sampling import Masks, Sampling
from helexa.neuron.ops.state_space import ScanOp, ScanSizes, ScanWeights
from helexa.neuron.tensors import Tensor

_SAMPLING_ARRAYS = 6  # number of temporary arrays, each as large as the logits, that torch's functions allocate


class Ops(DenseOps):
    """The kernels for one device and activation dtype; base of implementations.

    This class adds attention, mixtures of experts, recurrent layers, sampling and graphs to the layers of `DenseOps`.
    Shapes contain the words and letters that `DenseOps` defines. In addition, `head_dim` or D is the size of a head,
    and R is the number of rotated numbers per head, at most D.

    The methods `new_cache`, `page_bytes`, `rotate_store` and `attend` of one implementation use the same layout of the
    KV cache. In all layouts, the KV slot of a position is the number `page * PAGE_SIZE + offset in the page`.
    """

    # Whether attention with a sliding window never reads pages before the window. The engine can then give these pages
    # to other sequences.
    skips_pages: ClassVar[bool] = False

    @abstractmethod
    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the RoPE tables cos and sin times `factor`, each float32 [T, R / 2].

        The angles are the products of `positions` [T] and `frequencies` [R / 2].
        """

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
        """Normalize and rotate queries and keys; write keys and values to the KV cache.

        RoPE is the rotary embedding of Su et al., 2021. It rotates the first R of the D numbers of each head. Number i
        forms a pair with number i + R / 2.

        Args:
            qkv: the query heads, key heads and value heads of each row, [T, heads + 2 * kv_heads, D]; may be changed.
                With [T, heads + kv_heads, D], the key heads are also the value heads, before norm and RoPE. With [T,
                heads, D], nothing is stored: the layer reads the keys and values of another layer.
            heads: number of query heads.
            rope: cos and sin tables from `rope_tables`.
            slots: [T], KV slot of each row.
            norms: RMS norms of the heads; None for no norms.

        Returns:
            The rotated queries for `attend` with this cache, [T, heads, D]. For an 8-bit cache, they may also be
            transformed as the cached keys are.
        """

    def join_latent(
        self, queries: Tensor, absorbed: Tensor, latent: Tensor, norm: Tensor, eps: float, interleaved: bool
    ) -> Tensor:
        """Join queries and latent vectors into the argument `qkv` of `rotate_store`.

        Multi-head latent attention (MLA, DeepSeek-V2) stores one latent vector of L numbers per position instead of the
        keys and values of all heads. The result is [rows, heads + 1, R + L], the query heads and then one key head,
        which is also the value head. Each head has R numbers that `rotate_store` rotates, and then L numbers of the
        latent space.

        Args:
            queries: [rows, heads, width], of which RoPE rotates the last R numbers.
            absorbed: [rows, heads, L], the other numbers of the queries, mapped to the latent space.
            latent: [rows, L + R], the latent vector, and then the R numbers of the key that RoPE rotates.
            norm: float32 [L], weight of the RMS norm of the latent vector.
            interleaved: whether RoPE rotates numbers 2i and 2i + 1 as a pair; if False, numbers i and i + R / 2.
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
        """Return `qkv` with query heads multiplied by a factor for each row's position.

        `QueryTemperature` defines the factor.

        Args:
            qkv: [rows, heads + 2 * kv_heads, head_dim], as for `rotate_store`; may be changed.
            positions: int32 [rows].
        """
        slope, length = temperature
        factors = 1 + slope * (1 + positions // length).float().log()
        qkv[:, :heads] *= factors[:, None, None].to(qkv.dtype)
        return qkv

    def join_queries(self, gated: Tensor, kv: Tensor) -> Tensor:
        """Join queries, keys and values into `qkv` for `rotate_store`, without the gates.

        Args:
            gated: [rows, heads, 2, head_dim], the query and then the gate of each head. `gate_heads` takes the same
                tensor.
            kv: [rows, 2 * kv_heads, head_dim], the key heads and value heads.
        """
        return tensors.cat((gated[:, :, 0], kv), dim=1)

    def gate_heads(self, x: Tensor, gated: Tensor) -> Tensor:
        """Return `x * sigmoid(gate)` for x [rows, heads, head_dim], which may be changed.

        Args:
            gated: the gates [rows, heads, head_dim], or the queries and gates [rows, heads, 2, head_dim] of
                `join_queries`.
        """
        return x * (gated if len(gated.shape) == 3 else gated[:, :, 1]).sigmoid()

    @abstractmethod
    def page_bytes(self, kv_heads: int, head_dim: int, values: bool = True) -> int:
        """Return the bytes of one KV page in one layer (see `new_cache`)."""

    @abstractmethod
    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the maximum bytes of partial results of attention in a decode step.

        Attention has partial results if several thread blocks of a GPU divide the positions of one sequence, as in
        flash-decoding. A second kernel merges the partial results.
        """

    @abstractmethod
    def new_cache(self, kv_heads: int, pages: int, head_dim: int, values: bool = True) -> Tensor:
        """Return a zeroed KV cache with `pages` pages for one layer.

        Args:
            values: whether values differ from keys. If False, the numbers of a key that RoPE leaves unchanged are also
                the value. In the result of `attend`, the R numbers that RoPE rotates are then undefined.
        """

    @abstractmethod
    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return the attention [rows, heads, head_dim] of queries over the KV pages.

        The attention is causal, unless `batch.attention_ends` is set and `kind.causal` is False. `rotate_store` returns
        the queries. The cache must contain the keys and values of the batch's rows. Call this method only in a forward
        pass that `run` executes for `batch`.
        """

    def attend_sampled(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return causal attention of the rows `batch.sample_rows`.

        `queries` and the result are [rows, heads, head_dim] with only these rows. The conditions of `attend` apply, and
        `batch.has_unneeded_rows` must be True.
        """
        rows = batch.sample_rows.long()
        padded = queries.new_zeros(batch.tokens.shape[0], *queries.shape[1:])
        padded[rows] = queries
        return self.attend(padded, cache, batch, kind)[rows]

    @abstractmethod
    def attend_frames(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        """Return attention of each row to all rows of its frame, [T, heads, D].

        A frame consists of consecutive rows, such as the patches of an image, or of a window in an image.

        Args:
            qkv: [T, 3 * heads, D], the query heads, key heads and value heads of each row; may be changed.
            rope: cos and sin tables [T, R / 2] for queries and keys (see `rotate_store`); None for no rotation.
            lengths: number of rows of each frame. The sum is T.
            scale: factor on the products of queries and keys.
        """

    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
        act: str = "silu",
    ) -> MixtureOp:
        """Return an operator that computes a mixture of experts.

        This base class computes one expert after another. Implementations with a fused kernel override the method.

        Args:
            clamp: parameters of the clamped activation of gpt-oss; None for the activation `act`.
            shares: division of each expert's outputs among the ranks; None if this process computes all outputs.
            act: gate of the experts. `WITHOUT_GATE` for experts that have no gate and compute `down(relu(up(x)) ** 2)`.
        """
        step_bytes = self.step_bytes
        gate_ups = [self.linear(expert.gate_up, expert.gate_up_bias) for expert in experts]
        downs = [self.linear([expert.down], expert.down_bias) for expert in experts]
        # `linear` has counted the weights of all experts, but a decode step reads only the chosen experts.
        self.step_bytes = step_bytes + (self.step_bytes - step_bytes) * routing.top_k // len(experts)

        def gate(gate_up: Tensor) -> Tensor:
            hidden = self.activate(gate_up, act) if act == WITHOUT_GATE else self.gate_mul(gate_up, act)
            return hidden if shares is None else self.gather(hidden, shares.intermediate)

        def gather(out: Tensor) -> Tensor:
            return out if shares is None else self.gather(out, shares.hidden)

        return Mixture(routing, gate_ups, downs, clamp, gate, gather)

    def state_bytes(self, sizes: DeltaSizes | ConvSizes | ScanSizes) -> int:
        """Return the bytes of one sequence's recurrent state in a layer with `sizes`."""
        return sizes.state_bytes

    @abstractmethod
    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Return an operator for a Gated DeltaNet layer without its projections."""

    @abstractmethod
    def short_convolution(self, sizes: ConvSizes, weights: ConvWeights) -> ConvOp:
        """Return an operator for a gated short convolution without its projections."""

    @abstractmethod
    def scan(self, sizes: ScanSizes, weights: ScanWeights) -> ScanOp:
        """Return an operator for a Mamba-2 layer without its projections and its norm."""

    @abstractmethod
    def sample(self, logits: Tensor, sampling: Sampling, last: Tensor | None = None) -> Tensor:
        """Sample a token for each row of `logits`, which stay unchanged.

        Args:
            logits: [rows, vocabulary], any float dtype.
            last: int64, the tokens that the previous step has sampled; None if no adjustment in `sampling` refers to
                them.

        Returns:
            int64 [rows], tokens on the device. A row whose largest logit is NaN or infinite gets `NON_FINITE` (-1).
        """
        # An implementation for a GPU must return without waiting for the GPU. The engine reads the tokens later.

    @abstractmethod
    def sample_masked(self, logits: Tensor, masks: Masks, sampling: Sampling, last: Tensor | None = None) -> list[int]:
        """Return a token for each row in `masks`, sampled from the row's allowed tokens.

        The tokens are in the order of `masks`. The other arguments are as for `sample`. The random numbers differ from
        those of `sample`: `sample` has already drawn a token for each of these rows, and the grammar has rejected this
        token.
        """

    @abstractmethod
    def log_probabilities(
        self, logits: Tensor, tokens: Tensor, alternatives: int, rows: NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of a token per row, and of the likeliest tokens.

        Temperature does not apply. If the largest logit of a row is NaN or infinite, its log-probabilities are NaN.

        Args:
            logits: [S, vocabulary], S rows of any float dtype.
            tokens: int64 [S], the token of each row of `logits`. The log-probability of a negative token is undefined.
            alternatives: number of likeliest tokens to return, at most the vocabulary size.
            rows: int32 [R], the R rows to compute; None for all rows.

        Returns:
            float32 [R], the log-probability of each row's token; int64 [R, `alternatives`], the likeliest tokens, the
            likeliest first; float32 [R, `alternatives`], their log-probabilities.
        """

    def sampling_bytes(self, rows: int, width: int) -> int:
        """Return the maximum bytes that sampling allocates for logits [`rows`, `width`]."""
        return _SAMPLING_ARRAYS * rows * width * 4

    @abstractmethod
    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Run a forward pass or replay its captured graph, and return its result.

        The next call may overwrite the result.

        Args:
            capture: whether the implementation may capture the pass as a graph. The operations of the pass must then
                depend only on the shape of the batch, and it must be safe to run the pass twice.
        """

    @abstractmethod
    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture the forward pass of a bucket (batch size) as a graph.

        Call this method only if `fixed_addresses` is True.

        Args:
            blank: a batch of the bucket's size that contains only padding rows. Later batches of this bucket must be at
                the same memory addresses.

        Raises:
            RuntimeError: the pass cannot be captured.
        """

    @abstractmethod
    def forget(self) -> None:
        """Release all captured graphs and their memory."""
