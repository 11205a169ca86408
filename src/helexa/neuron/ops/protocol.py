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
    """Cache of a model's prepared weight matrices between starts of an engine, by name.

    The matrices are in the layout that the kernels read.
    """

    def get(self, name: str, shape: tuple[int, ...]) -> Any | None:
        """Return the matrix `name`, or None if the store has no matrix of this name and shape."""
        ...

    def add(self, name: str, matrix: Any) -> None:
        """Add a newly prepared matrix. It is not written to disk before `save`."""
        ...

    def save(self) -> object:
        """Start to write the added matrices to disk for the next start, and return without waiting."""
        ...


class Ops(ABC):
    """The kernels of one device and activation dtype.

    Each implementation defines every operation itself; a class that lacks an operation cannot be constructed. A method
    that runs another implementation's code calls that code by name. Each implementation has its own KV cache layout,
    which `new_cache`, `page_bytes`, `rotate_store` and `attend` share. Slot = page * PAGE_SIZE + offset.

    Args:
        kv_bits: bits of each number in the KV cache.
        quantised: whether products use quantized weights directly. If False, weights are rounded to the quantized
            values but take the space of plain weights.
        joins: whether a product of several matrices copies them into one matrix, which replaces them.
        tabled: whether kernels read all batch data from tensors, so that steps can be captured per bucket.
        captures_state: whether steps that change the state of recurrent layers can be captured.
        gathers: whether attention copies the KV pages that it reads.

    Attributes:
        step_bytes: bytes of all weights that products were prepared for, which equals the weight bytes read by one
            decode step.
        ranks: the position of this process among the ranks that compute the model. Set before the model is built.
    """

    name: ClassVar[str]
    """Name of the kernel implementation, shown to users."""

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

    @abstractmethod
    def store(self, model: Path, quant: str = "") -> MatrixStore | None:
        """Return the disk cache of the model's prepared weights; None if the implementation has no such cache.

        Args:
            model: path of the model.
            quant: name of the quantization applied to plain weights. Each quantization has its own cache.
        """
        ...

    @abstractmethod
    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Any:
        """Return a weight [N, K] in the layout of these kernels, for `linear` and `embedding`.

        Args:
            form: format to quantize a plain weight to; None for no quantization. The format must fit K. A weight that
                cannot be quantized (see `quantize`) stays plain.
        """
        ...

    @abstractmethod
    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return an operator that computes `x @ weight.T + bias` for inputs x [T, K].

        Args:
            matrices: weights [N, K] prepared by `matrix`. The operator concatenates their outputs.
            bias: float32, for the concatenated outputs; None for no bias.
            gate: activation, `silu` or `gelu_tanh`; None for no gate. With a gate, the operator takes x [T, 2 * K], and
                multiplies the matrix by `gate(first half of x) * second half of x`.
        """
        ...

    @abstractmethod
    def matrix_bytes(self, weight: Weight) -> int:
        """Return the number of bytes of the matrix that `matrix()` builds from a weight [N, K].

        Args:
            weight: a weight that may be on torch's meta device. If `matrix()` quantizes the weight, pass the quantized
                weight.
        """
        ...

    @abstractmethod
    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the number of bytes that one call of `linear` or `mixture` allocates, without the given matrices.

        Args:
            weights: weights of one `linear` product, or of all experts of a mixture. They may be on the meta device.
        """
        ...

    @abstractmethod
    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        """Return the rows of a matrix [V, H] for tokens [T], times `factor`, as float32 [T, H].

        Args:
            rows: the rows of the vocabulary that the matrix has; tokens outside get zeros. None for all rows.
        """
        ...

    @abstractmethod
    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first) * second` for the halves of [T, 2 * I]; `gate` is a name in `GATES`."""
        ...

    @abstractmethod
    def connect(self, exchange: Exchange) -> None:
        """Set how this rank exchanges results with the other ranks. Called before the first forward pass."""
        ...

    @abstractmethod
    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`], from this rank's columns x [T, own columns].

        All ranks must call the method in the same order and with the same T.
        """
        ...

    @abstractmethod
    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [T, H] over all ranks, added in the order of the ranks."""
        ...

    @abstractmethod
    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Return an RMS norm operator with a float32 weight [H]."""
        ...

    @abstractmethod
    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the cos and the sin of positions [T] times frequencies [R / 2], each float32 [T, R / 2].

        Args:
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

        Only the first R numbers of each head are rotated. Number i of these is paired with number i + R / 2.

        Args:
            qkv: [T, heads + 2 * kv_heads, D], queries, keys and values; may be changed in place.
            heads: number of query heads.
            rope: cos and sin tables from `rope_tables`.
            slots: [T], KV slot of each row.
            norms: weights of the norms that are applied to each query and key head before RoPE; None for no norms.

        Returns:
            The rotated queries, [T, heads, D].
        """
        ...

    @abstractmethod
    def mixture(
        self,
        experts: Sequence[Expert],
        routing: Routing,
        clamp: Clamp | None = None,
        shares: ExpertShares | None = None,
    ) -> MixtureOp:
        """Prepare a mixture of experts.

        Args:
            clamp: clamped activation; None selects silu.
            shares: division of each expert's outputs among the ranks; None if this process has the whole experts.
        """
        ...

    @abstractmethod
    def state_bytes(self, sizes: DeltaSizes) -> int:
        """Return the number of bytes of one sequence's recurrent state in a Gated DeltaNet layer of these sizes."""
        ...

    @abstractmethod
    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Return the operator of a Gated DeltaNet layer between its input projections and its output projection."""
        ...

    @abstractmethod
    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)` for out and x [T, H] and gate [T, 1]; may change `out`."""
        ...

    @abstractmethod
    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the rows of x [T, H] with the indexes `rows` [S], as [S, H]."""
        ...

    @abstractmethod
    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """Return a sampled token for each row of logits [S, V], without waiting for the device.

        Args:
            logits: any float dtype.
            settings: sampling parameters of each row (see `sampling.Settings`).
        """
        ...

    @abstractmethod
    def choose_masked(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """Return a sampled token for each row that has a mask, among the tokens that the mask allows.

        Args:
            masks: allowed tokens by row (see `sampling.Masks`).
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

        Partial results exist if several programs share the positions of one sequence and a second kernel merges them.

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
        """Return the causal attention output [T, heads, D] of queries [T, heads, D] over the pages of their sequences.

        `rotate_store` has already written the keys and values of these rows to the cache.
        """
        ...

    @abstractmethod
    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Run a forward pass of a model, or replay its captured graph, and return the logits [S, V].

        Args:
            forward: function that computes the logits of a batch.
            capture: whether the implementation may capture the pass as a graph and replay it. The operations of the
                pass must then depend only on the shape of the batch, and it must be safe to run the pass twice.
        """
        ...

    @abstractmethod
    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture the forward pass of a bucket (batch size) as a graph. Called only if these kernels are `tabled`.

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
