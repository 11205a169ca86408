"""The operations that every implementation of the kernels has."""

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
from helexa.neuron.ops.mixture import Clamp, Expert, MixtureOp, Routing
from helexa.neuron.ops.norm import HeadNorms, NormOp
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.quantization.quant_form import QuantForm


class MatrixStore(Protocol):
    """Matrices by name, in the form in which kernels take them."""

    def get(self, name: str, shape: tuple[int, ...]) -> Any | None:
        """The matrix `name` if it is here in that shape."""
        ...

    def add(self, name: str, matrix: Any) -> None:
        """Remember a matrix."""
        ...

    def save(self) -> object:
        """Keep what was added for the next start; returns at once."""
        ...


class Ops(ABC):
    """The kernels of one device and activation dtype.

    Each implementation defines every operation itself; a class that lacks an operation cannot be constructed. A method
    that runs another implementation's code calls that code by name. Each implementation has its own KV cache layout,
    which `new_cache`, `page_bytes`, `rotate_store` and `attend` share. Slot = page * PAGE_SIZE + offset.

    Args:
        kv_bits: of each number in the KV cache.
        quantised: products leave quantised weights as they are; else these are rounded, but no smaller.
        joins: products of several matrices make one of them, which takes their place.
        tabled: kernels read nothing of a batch but its tensors, so that steps can be recorded by their buckets.
        records_state: steps that change the state of recurrent layers can be recorded, too.
        gathers: attention copies the pages that it reads.

    Attributes:
        step_bytes: of all weights that products were prepared for: what one decode step reads.
    """

    name: ClassVar[str]
    """What users call the implementation."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kv_bits: int,
        quantised: bool,
        joins: bool,
        tabled: bool,
        records_state: bool,
        gathers: bool,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.kv_bits = kv_bits
        self.quantised = quantised
        self.joins = joins
        self.tabled = tabled
        self.records_state = records_state
        self.gathers = gathers
        self.step_bytes = 0

    @abstractmethod
    def store(self, model: Path, quant: str = "") -> MatrixStore | None:
        """Where prepared weights of the model at this path are kept from one start to the next, if anywhere.

        Args:
            quant: what plain weights become; another is another place.
        """
        ...

    @abstractmethod
    def matrix(self, weight: Weight, form: QuantForm | None = None) -> Any:
        """A weight [N, K] as `linear` and `embedding` of these kernels take it.

        Args:
            form: what to quantise it to if it is plain, and if that can be (see `quantize`); it fits K.
        """
        ...

    @abstractmethod
    def linear(self, parts: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Prepare `x -> x @ weight.T + bias` for x of [T, K]; outputs of several matrices lie side by side.

        Args:
            bias: float32, of all outputs together.
            gate: a name in `reference.GATES`; the operator takes x of [T, 2 * K], and multiplies `gate(first) * second`
                for its halves.
        """
        ...

    @abstractmethod
    def matrix_bytes(self, weight: Weight) -> int:
        """Bytes of the matrix that `matrix` makes of a weight [N, K].

        Args:
            weight: as it is quantised, if `matrix` quantises it; may be on torch's meta device.
        """
        ...

    @abstractmethod
    def product_bytes(self, parts: Sequence[Weight]) -> ProductBytes:
        """Bytes that `linear` allocates for the product of several weights, or `mixture` for those of all experts.

        Args:
            parts: see `matrix_bytes`.
        """
        ...

    @abstractmethod
    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0) -> Tensor:
        """Rows of a matrix [V, H] for tokens [T], times `factor`, as float32 [T, H]."""
        ...

    @abstractmethod
    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Prepare a norm; the weight is [H], float32."""
        ...

    @abstractmethod
    def rope_tables(self, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, R / 2], of positions [T] times frequencies [R / 2]; both times `factor`."""
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
        """Normalise and rotate queries and keys (Su et al., 2021; halves paired), store keys and values.

        Only the first R numbers of each head are rotated.

        Args:
            qkv: [T, heads + 2 * kv_heads, D]; may be changed.
            rope: see `rope_tables`.
            slots: [T], where this step's K and V go.
            norms: of each head, before the rotation; None does not normalise.

        Returns:
            The rotated queries, [T, heads, D].
        """
        ...

    @abstractmethod
    def mixture(self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None = None) -> MixtureOp:
        """Prepare a mixture of experts.

        Args:
            clamp: the activation, if it is not silu.
        """
        ...

    @abstractmethod
    def state_bytes(self, sizes: DeltaSizes) -> int:
        """Of what a Gated DeltaNet layer keeps of one sequence."""
        ...

    @abstractmethod
    def delta_rule(self, sizes: DeltaSizes, weights: DeltaWeights) -> DeltaOp:
        """Prepare what a Gated DeltaNet layer does between its projections."""
        ...

    @abstractmethod
    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """`out + x * sigmoid(gate)` for out and x of [T, H] and a gate [T, 1]; may change `out`."""
        ...

    @abstractmethod
    def choose_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows [S] of x [T, H]."""
        ...

    @abstractmethod
    def choose(self, logits: Tensor, settings: sampling.Settings) -> Tensor:
        """A token for each row of [S, V], any float dtype (see `sampling.choose`); not waited for."""
        ...

    @abstractmethod
    def choose_of(self, logits: Tensor, masks: sampling.Masks, settings: sampling.Settings) -> list[int]:
        """The same for some rows, of what their masks leave (see `sampling.choose_of`)."""
        ...

    @abstractmethod
    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one page of one layer."""
        ...

    @abstractmethod
    def parts_bytes(self, sequences: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of what attention keeps of the parts of sequences, at most, before it is put together."""
        ...

    @abstractmethod
    def new_cache(self, kv_heads: int, pages: int, head_dim: int) -> Tensor:
        """A zeroed KV cache of one layer, whose layout `rotate_store` and `attend` know."""
        ...

    @abstractmethod
    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        """Causal attention of each row over its own sequence's pages; queries and result are [T, heads, D]."""
        ...

    @abstractmethod
    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, recorded: bool = True) -> Tensor:
        """Run a forward pass of a model; logits [S, vocabulary].

        Args:
            recorded: what the pass computes depends on nothing but the batch and its shape; it may be recorded and run
                again, and its effects may be repeated.
        """
        ...

    @abstractmethod
    def record(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Record the forward pass of a bucket, if these kernels are `tabled`.

        Args:
            blank: a batch of the bucket's size none of whose rows stands for anything.

        Raises:
            RuntimeError: the pass cannot be recorded.
        """
        ...

    @abstractmethod
    def forget(self) -> None:
        """Give up what was recorded, and its memory."""
        ...
