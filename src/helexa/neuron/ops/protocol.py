"""Operations that every kernel implementation provides."""

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
    """Store of prepared matrices by name, in the layout that the kernels read."""

    def get(self, name: str, shape: tuple[int, ...]) -> Any | None:
        """Return the matrix `name` if the store has it in shape `shape`, else None."""
        ...

    def add(self, name: str, matrix: Any) -> None:
        """Add a matrix to the store."""
        ...

    def save(self) -> object:
        """Write the added matrices to disk for the next start; return without waiting."""
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
    """Name of the implementation, shown to users."""

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
        """Return the store that keeps the model's prepared weights between starts, or None.

        Args:
            model: path of the model.
            quant: quantization of plain weights; each quantization has its own store.
        """
        ...

    @abstractmethod
    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Any:
        """Prepare a weight [N, K] for `linear` and `embedding`.

        Args:
            form: format to quantize a plain weight to, if the weight can be quantized (see `quantize`). The format must
                fit K.
        """
        ...

    @abstractmethod
    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Prepare `x -> x @ weight.T + bias` for x of [T, K]; the outputs of several matrices are concatenated.

        Args:
            bias: float32, for the concatenated outputs.
            gate: a name in `reference.GATES`. With a gate, the operator takes x of [T, 2 * K] and multiplies the matrix
                by `gate(first half) * second half`.
        """
        ...

    @abstractmethod
    def matrix_bytes(self, weight: Weight) -> int:
        """Return the size in bytes of the matrix that `matrix()` builds from a weight [N, K].

        Args:
            weight: the weight after quantization, if `matrix` quantizes it; may be on torch's meta device.
        """
        ...

    @abstractmethod
    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the bytes that `linear` or `mixture` allocates.

        Args:
            weights: weights of one `linear` product, or of all experts of a mixture; see `matrix_bytes`.
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
        """Prepare an RMS norm with a weight [H], float32."""
        ...

    @abstractmethod
    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return cos and sin, float32 [T, R / 2], of positions [T] times frequencies [R / 2].

        `factor` multiplies both tables.
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
        """Normalize and rotate queries and keys (Su et al., 2021; paired halves), then store keys and values.

        Only the first R numbers of each head are rotated.

        Args:
            qkv: [T, heads + 2 * kv_heads, D]; may be changed in place.
            rope: cos and sin tables, see `rope_tables`.
            slots: [T], KV slot of each row.
            norms: weights of the norms of each head, applied before the rotation; None skips the norms.

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
        """Return the bytes of one sequence's state in a Gated DeltaNet layer."""
        ...

    @abstractmethod
    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Prepare the operator between the projections of a Gated DeltaNet layer."""
        ...

    @abstractmethod
    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)` for out and x [T, H] and gate [T, 1]; may change `out`."""
        ...

    @abstractmethod
    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return rows [S] of x [T, H]."""
        ...

    @abstractmethod
    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """Return a token for each row of [S, V], any float dtype, without waiting (see `sampling.choose`)."""
        ...

    @abstractmethod
    def choose_masked(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """Return a token for each masked row (see `sampling.choose_masked`)."""
        ...

    @abstractmethod
    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one KV page in one layer."""
        ...

    @abstractmethod
    def partials_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the maximum bytes of attention's partial results before they are merged."""
        ...

    @abstractmethod
    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """Return a zeroed KV cache of one layer, in the layout of `rotate_store` and `attend`."""
        ...

    @abstractmethod
    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Return the causal attention of each row over its own sequence's pages.

        Queries and result are [T, heads, D].
        """
        ...

    @abstractmethod
    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        """Run a forward pass of a model and return the logits [S, vocabulary].

        Args:
            capture: whether the pass may be captured and replayed. If True, the pass depends only on the batch and its
                shape, and repeating its side effects is safe.
        """
        ...

    @abstractmethod
    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture the forward pass of a bucket, if these kernels are `tabled`.

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
