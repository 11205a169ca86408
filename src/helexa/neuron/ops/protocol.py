"""Interface of the kernel implementations: the operations that models and the engine use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from helexa.neuron.ops import sampling
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.delta.delta_rule import DeltaOp, DeltaSizes, DeltaWeights
from helexa.neuron.ops.linear import LinearOp, ProductBytes
from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, MixtureOp, Routing
from helexa.neuron.ops.norm import HeadNorms, NormOp
from helexa.neuron.ops.ranks.exchange import Exchange
from helexa.neuron.ops.ranks.rank_group import SINGLE, RankGroup
from helexa.neuron.ops.ranks.shares import RowRange, Shares
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.quantization.quant_form import QuantForm


class MatrixStore(Protocol):
    """Disk cache of one model's weight matrices, in the memory layout that the kernels read.

    The first start of an engine converts the matrices from the checkpoint and adds them to the cache. Later starts read
    the converted matrices, which is faster.
    """

    def get(self, name: str, shape: tuple[int, ...]) -> Any | None:
        """Return the matrix with the name `name`, or None if the cache has no matrix of this name and shape."""
        ...

    def add(self, name: str, matrix: Any) -> None:
        """Add a matrix that was converted from the checkpoint. Only `save` writes the matrix to disk."""
        ...

    def save(self) -> object:
        """Start to write the added matrices to disk in the background, and return without waiting."""
        ...


class Ops(ABC):
    """The kernels for one device and activation dtype: base class of all implementations.

    The layout of the KV cache depends on the implementation. The methods `new_cache`, `page_bytes`, `rotate_store` and
    `attend` of one implementation use the same layout. In all layouts, the KV slot of a position is the number
    `page * PAGE_SIZE + offset in the page`.

    The shapes of arguments and results contain these letters:

    * T: number of rows (tokens) in the batch. S: number of rows whose logits are needed
    * H: hidden size. I: intermediate size of a feed-forward layer. V: vocabulary size
    * N and K: rows and columns of a weight matrix, which are the outputs and inputs of a linear layer
    * D: head dimension. R: number of rotated numbers per head, at most D

    Args:
        kv_bits: bits of each number in the KV cache.
        quantised: whether linear operators keep quantized weights quantized in memory. If False, the operators store
            dequantized weights, which take as much memory as plain weights.
        joins: whether `linear` copies several matrices into one new matrix. The given matrices can then be freed.
        tabled: whether kernels read all data of a batch from tensors with fixed addresses. The engine can then capture
            one graph per bucket (batch size) in advance with `capture`.
        captures_state: whether graphs can be captured for models with recurrent layers, whose state changes in each
            step.
        gathers: whether plain torch computes the attention of prompts and copies the KV pages that it reads. The memory
            estimate includes these copies.

    Attributes:
        step_bytes: bytes of the weights that one decode step of a single sequence reads. Building the model increases
            the number: each linear operator adds its weights, and each mixture adds the weights of as many experts as
            one token uses.
        exchange: how this rank exchanges results with the other ranks; None before `connect`.
        ranks: the position of this process among the ranks (processes) that compute the model together. Set before the
            model is built.
    """

    name: ClassVar[str]
    """Name of the kernel implementation, shown to users."""

    counts_items: ClassVar[bool] = False
    """Whether the progress count of this process grows with each work item of a kernel."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kv_bits: int,
        quantised: bool,
        joins: bool,
        tabled: bool,
        captures_state: bool,
        gathers: bool,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.kv_bits = kv_bits
        self.quantised = quantised
        self.joins = joins
        self.tabled = tabled
        self.captures_state = captures_state
        self.gathers = gathers
        self.step_bytes = 0
        self.ranks: RankGroup = SINGLE
        self.exchange: Exchange | None = None

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of the tensors that operators pass to each other, except for the residual stream in float32."""
        return self.dtype

    @abstractmethod
    def store(self, model: Path, quant: str = "", part: str = "") -> MatrixStore | None:
        """Return the disk cache of a model's converted weights; None if the implementation has no disk cache.

        Args:
            model: path of the model's file or folder.
            quant: name of the quantization applied to plain weights. Each quantization has its own cache.
            part: the part of the model that this process computes; empty for the whole model. Each part has its own
                cache.
        """
        ...

    @abstractmethod
    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Any:
        """Return a weight [N, K] in the memory layout of these kernels.

        The methods `linear`, `embedding` and `mixture` take matrices in this layout.

        Args:
            weight: plain or quantized weight.
            form: format to quantize a plain weight to; None for no quantization. `form.fits(K)` must be True. A weight
                that contains infinite, NaN or very large numbers stays plain.
        """
        ...

    @abstractmethod
    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return an operator that computes `x @ weight.T + bias` for inputs x [T, K].

        Args:
            matrices: weights [N, K] from `matrix`. The operator concatenates the outputs of all matrices.
            bias: float32, for the concatenated outputs; None for no bias.
            gate: name of an activation, `silu` or `gelu_tanh`; None for no gate. With a gate, x is [T, 2 * K], and the
                operator multiplies `gate(first half of x) * second half of x`, [T, K], by the weights.
        """
        ...

    @abstractmethod
    def matrix_bytes(self, weight: Weight) -> int:
        """Return the number of bytes of the matrix that `matrix()` builds from a weight [N, K].

        Args:
            weight: the weight, which may be on torch's meta device. If `matrix()` would quantize the weight, pass the
                quantized weight.
        """
        ...

    @abstractmethod
    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the number of bytes that `linear` or `mixture` allocates in addition to the given matrices.

        Args:
            weights: weights of one linear operator; or the gate and up weights, or the down weights, of all experts of
                a mixture. The weights may be on torch's meta device.
        """
        ...

    @abstractmethod
    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        """Return the embeddings of T tokens: rows of a matrix [V, H], times `factor`, as float32 [T, H].

        Args:
            matrix: embedding matrix from `matrix`, or its rows in the range `rows`.
            tokens: [T], token ids.
            rows: range of token ids whose embeddings `matrix` contains. Other tokens get zeros. None if `matrix`
                contains the whole vocabulary.
        """
        ...

    @abstractmethod
    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first half) * second half` of `gate_up` [T, 2 * I], as [T, I].

        Args:
            gate: name of the activation, `silu` or `gelu_tanh`.
        """
        ...

    @abstractmethod
    def connect(self, exchange: Exchange) -> None:
        """Set how this rank exchanges results with the other ranks that compute the model.

        If there are several ranks, call this method before the first forward pass.
        """
        ...

    @abstractmethod
    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks side by side, [T, `shares.total`] (all-gather).

        All ranks must call this method in the same order and with the same T.

        Args:
            x: this rank's columns, [T, number of own columns].
            shares: division of the columns among the ranks.
        """
        ...

    @abstractmethod
    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [T, H] over all ranks (all-reduce), added in the order of the ranks."""
        ...

    @abstractmethod
    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Return an operator that computes the RMS norm with a float32 weight [H]."""
        ...

    @abstractmethod
    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        """Return an operator that computes the layer norm (Ba et al., 2016) with a float32 weight [H] and bias [H]."""
        ...

    @abstractmethod
    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation of each number of x [T, I]; may change x in place.

        Args:
            activation: name of the activation: `silu`, `gelu_tanh`, or `gelu` for the exact GELU.
        """
        ...

    @abstractmethod
    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the RoPE tables: cos and sin of each position times each frequency, both float32 [T, R / 2].

        Args:
            positions: [T].
            frequencies: float32 [R / 2].
            factor: number by which both tables are multiplied.
        """
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
        """Apply norms and RoPE (Su et al., 2021) to queries and keys, and write keys and values to the KV cache.

        RoPE rotates the first R of the D numbers of each head. Number i forms a pair with number i + R / 2.

        Args:
            qkv: [T, heads + 2 * kv_heads, D], the query heads, key heads and value heads of each row; may be changed in
                place.
            heads: number of query heads.
            rope: cos and sin tables from `rope_tables`.
            cache: KV cache of the layer, from `new_cache`.
            slots: [T], KV slot of each row.
            norms: weights of the norms that are applied to each query and key head before RoPE; None for no norms.

        Returns:
            The rotated queries, [T, heads, D].
        """
        ...

    def join_queries(self, gated: Tensor, kv: Tensor) -> Tensor:
        """Return the argument `qkv` of `rotate_store`, [T, heads + 2 * kv_heads, D], of attention with output gates.

        Args:
            gated: [T, heads, 2, D], the query and then the gate of each head.
            kv: [T, 2 * kv_heads, D], the key heads and value heads.
        """
        return torch.cat((gated[:, :, 0], kv), dim=1)

    def gate_heads(self, x: Tensor, gated: Tensor) -> Tensor:
        """Return `x * sigmoid(gate)` for x [T, heads, D], which may be changed in place.

        Args:
            gated: [T, heads, 2, D], the query and then the gate of each head.
        """
        return x * gated[:, :, 1].sigmoid()

    @abstractmethod
    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
    ) -> MixtureOp:
        """Return an operator that computes a mixture of experts.

        Args:
            experts: the weights of each expert.
            routing: rule that selects the experts of each row and their weights.
            clamp: parameters of the clamped activation of gpt-oss; None for SiLU.
            shares: division of each expert's outputs among the ranks; None if this process has the whole experts.
        """
        ...

    @abstractmethod
    def state_bytes(self, sizes: DeltaSizes) -> int:
        """Return the number of bytes of one sequence's recurrent state in a Gated DeltaNet layer of these sizes."""
        ...

    @abstractmethod
    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Return an operator that computes a Gated DeltaNet layer without its input and output projections."""
        ...

    @abstractmethod
    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)` for out and x [T, H] and gate [T, 1]; may change `out` in place."""
        ...

    @abstractmethod
    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the S rows of x [T, H] with the indexes `rows` [S], as [S, H]."""
        ...

    @abstractmethod
    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """Sample a token for each row of logits [S, V].

        The engine reads the tokens later. An implementation for GPUs should therefore not wait for the device.

        Args:
            logits: any float dtype.
            settings: sampling parameters of each row (see `sampling.Settings`).

        Returns:
            int64 [S], tokens on the device. A row whose largest logit is NaN or infinite gets `NON_FINITE` (-1).
        """
        ...

    @abstractmethod
    def choose_masked(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """Return a sampled token for each row of logits [S, V] that has a mask, among the tokens that the mask allows.

        Args:
            masks: bit mask of the allowed tokens, by index of the row (see `sampling.Masks`).
            settings: sampling parameters, one column per row in `masks`.
        """
        ...

    @abstractmethod
    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the number of bytes of one KV page in one layer."""
        ...

    @abstractmethod
    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the maximum number of bytes that attention in a decode step allocates for partial results.

        Attention has partial results if several GPU programs (thread blocks) divide the positions of one sequence, as
        in flash-decoding. A second kernel merges the partial results.

        Args:
            sequences: maximum number of sequences in a step.
        """
        ...

    @abstractmethod
    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """Return a zeroed KV cache with `pages` pages for one layer."""
        ...

    @abstractmethod
    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return the causal attention output [T, heads, D] of queries [T, heads, D] over their sequences' KV pages.

        Before this call, `rotate_store` must have written the keys and values of the batch's rows to the cache.
        """
        ...

    @abstractmethod
    def attend_frames(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        """Return the attention output [T, heads, D], in which each row attends to all rows of its frame.

        A frame is consecutive rows, such as the patches of an image or of a window.

        Args:
            qkv: [T, 3 * heads, D], the query heads, key heads and value heads of each row; may be changed in place.
            rope: cos and sin tables [T, R / 2] for the rotation of queries and keys (see `rotate_store`); None for no
                rotation.
            lengths: number of rows of each frame. The sum is T.
            scale: factor on the products of queries and keys.
        """
        ...

    @abstractmethod
    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Run a forward pass of a model, or replay its captured graph, and return its result, usually logits [S, V].

        Args:
            forward: function that runs the forward pass for a batch and returns the result.
            capture: whether the implementation may capture the forward pass as a graph and replay the graph. The
                operations of the pass must then depend only on the shape of the batch, and it must be safe to run the
                pass twice.
        """
        ...

    @abstractmethod
    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture the forward pass of a bucket (batch size) as a graph. Call this only if `tabled` is True.

        Args:
            forward: function that computes the logits of a batch.
            blank: a batch of the bucket's size that contains only padding rows.

        Raises:
            RuntimeError: the pass cannot be captured.
        """
        ...

    @abstractmethod
    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        ...
