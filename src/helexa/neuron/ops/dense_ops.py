"""Interface of kernels that compute each row alone: matrix products, norms, gates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from helexa.neuron import tensors
from helexa.neuron.ops.linear_and_norm_operators import HeadLinearOp, LinearOp, NoNorm, NormOp, ProductBytes, RmsNorm
from helexa.neuron.ops.rank_group_and_shares import SINGLE, Exchange, RankGroup, RowRange, Shares
from helexa.neuron.tensors import Device, DType, Tensor
from helexa.neuron.weights.quantization_formats import QuantFormat
from helexa.neuron.weights.quantized_matrix import Weight


class MatrixStore:
    """A disk cache of one model's weight matrices in the layout of the kernels.

    The first start of an engine converts the matrices from the checkpoint. Later starts read the converted matrices,
    which is faster. This base class stores nothing.
    """

    def get(self, name: str, shape: tuple[int, ...]) -> Any | None:
        """Return the matrix `name`; None if no matrix with this name and shape is stored."""
        return None

    def add(self, name: str, matrix: Any) -> None:
        """Add a converted matrix. `finish` writes the added matrices to disk."""

    def finish(self, looked_up: Sequence[Any] = ()) -> object:
        """End the load of a model, and write the added matrices to disk in the background.

        `looked_up` are the matrices of which a step reads single rows, such as an embedding.
        """
        return None


class DenseOps(ABC):
    """The part of `Ops` that computes each row of a batch alone.

    A method that "may change" an argument changes the tensor in place. The shapes of arguments and results contain
    these words or letters:

    * `rows` or T: number of rows (tokens) in the batch. S: number of rows whose logits are needed
    * `hidden` or H: hidden size. `width` or I: intermediate size of a feed-forward layer. V: vocabulary size
    * `outputs` or N, and `inputs` or K: rows and columns of a linear layer's weight matrix

    Activations have these names: `silu`, `gelu_tanh`, `gelu` (the exact GELU) and `relu2` (the square of a positive
    number, and 0 for other numbers). A gate is `silu` or `gelu_tanh`.

    The methods `..._bytes` serve the memory estimate before a model is loaded. The weights that they take may be on
    torch's meta device.
    """

    name: ClassVar[str]  # Name of the kernel implementation, shown to users

    # Whether kernels report progress while they run, by increasing the progress counter of this process after each work
    # item.
    counts_items: ClassVar[bool] = False

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
        """Return the disk cache of a model's converted weights.

        Each quantization and each part of a model has its own cache. The cache of this base class stores nothing.

        Args:
            model: path of the model's file or folder.
            quant: name of the quantization applied to plain weights.
            part: the part of the model that this process computes; empty for the whole model.
        """
        return MatrixStore()

    @abstractmethod
    def matrix(self, weight: Weight, quant_format: QuantFormat | None = None) -> Any:
        """Return a weight [outputs, K] in the memory layout of these kernels.

        The methods `linear`, `embedding` and `mixture` take matrices in this layout.

        Args:
            quant_format: format to quantize a plain weight to; None for no quantization. `quant_format.fits(K)` must be
                True. A weight that contains infinite, NaN or very large numbers stays plain.
        """

    @abstractmethod
    def linear(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return an operator that computes `x @ weight.T + bias` for inputs x [T, inputs].

        The operator concatenates the outputs of all matrices. With a gate, x is [T, 2 * inputs], and the operator
        multiplies `gate(first half of x) * second half of x`, [T, inputs], by the weights.

        Args:
            matrices: weights [outputs, inputs] from `matrix`.
            bias: float32, for the concatenated outputs.
        """

    @abstractmethod
    def head_linear(self, matrices: Sequence[Any]) -> HeadLinearOp:
        """Return an operator that multiplies each head by the head's own matrix.

        The operator takes x [rows, heads, width] and the index `first` of a column, by default 0. For each head, it
        multiplies the K columns from `first` on by the head's matrix, a weight [outputs, K] from `matrix`, and returns
        [rows, heads, outputs]. Kernels that need matrices of one format raise a ModelFileError if the formats differ.
        """

    @abstractmethod
    def matrix_bytes(self, weight: Weight) -> int:
        """Return the number of bytes of the matrix that `matrix(weight)` returns.

        If `matrix()` would quantize the weight, pass the quantized weight.
        """

    @abstractmethod
    def product_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the bytes that `linear` or `mixture` allocates besides the matrices.

        Args:
            weights: weights of one linear operator; or the gate and up weights, or the down weights, of all experts of
                a mixture.
        """

    @abstractmethod
    def head_linear_bytes(self, weights: Sequence[Weight]) -> ProductBytes:
        """Return the bytes that `head_linear` allocates besides the matrices."""

    @abstractmethod
    def embedding(self, matrix: Any, tokens: Tensor, factor: float = 1.0, rows: RowRange | None = None) -> Tensor:
        """Return the embeddings of T tokens times `factor`, float32 [T, hidden].

        Args:
            matrix: result of the method `matrix` for the embedding weight, or for the rows `rows` of this weight.
            rows: range of token ids whose embeddings `matrix` contains. Other tokens get zeros. None for the whole
                vocabulary.
        """

    @abstractmethod
    def choose_rows(self, x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the rows of x [rows, hidden] with the S indexes `rows`, as [S, hidden].

        Args:
            out: float32 [S, hidden], memory for the result; None for new memory.
        """

    @abstractmethod
    def rms_norm(self, weight: Tensor, eps: float) -> NormOp:
        """Return an operator that computes the RMS norm with a float32 weight [hidden]."""

    @abstractmethod
    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NormOp:
        """Return a layer norm operator (Ba et al., 2016); weight, bias: float32 [hidden]."""

    @abstractmethod
    def group_norm(self, weight: Tensor, groups: int, eps: float) -> Callable[[Tensor], Tensor]:
        """Return an operator that computes RMS norms of groups of adjacent columns.

        The operator returns the norms [rows, I] of x [rows, I]. Each group has I / `groups` columns. The weight is
        float32 [I].
        """

    def norm_columns(self, x: Tensor, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
        """Return x [T, N] with separate RMS norms of its first M and its next L columns.

        The other columns stay the same. x may be changed. The weights are float32 [M] and [L].
        """
        start = 0
        for weight in weights:
            stop = start + len(weight)
            x[:, start:stop] = RmsNorm(weight, eps, x.dtype)(x[:, start:stop])
            start = stop
        return x

    def without_norm(self) -> NormOp:
        """Return an operator for a sublayer whose input is not normalized.

        It adds `delta` to x as a norm operator does (see `NormOp`), and returns x in the activation dtype. The result
        may be x itself.
        """
        return NoNorm(self.activation_dtype)

    @abstractmethod
    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return the activation of each number of x [rows, width]; may change x."""

    @abstractmethod
    def gate_mul(self, gate_up: Tensor, gate: str) -> Tensor:
        """Return `gate(first half) * second half` of `gate_up` [rows, 2 * width]."""

    def gate_inputs(self, x: Tensor, inputs: Tensor, first: int, gate: str) -> Tensor:
        """Return `gate(x)` times the I columns of `inputs` [T, N] from `first` on, [T, I]."""
        own = inputs[:, first : first + x.shape[1]].to(x.dtype)
        return self.gate_mul(tensors.cat((x, own), dim=1), gate)

    @abstractmethod
    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """Return `out + x`, which may overwrite `out`; both are [rows, hidden]."""

    @abstractmethod
    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Return `out + x * sigmoid(gate)`; may overwrite `out`; `gate` is [rows, 1]."""

    def add_scaled(self, x: Tensor, delta: Tensor, factor: float) -> Tensor:
        """Return `(x + delta) * factor`, in x; x and delta are [rows, hidden]."""
        return x.add_(delta).mul_(factor)

    def soft_cap(self, logits: Tensor, cap: float, bias: Tensor | None = None) -> Tensor:
        """Return `cap * tanh(logits / cap) + bias`, [rows, V]; may overwrite `logits`."""
        # An infinite logit is a sign of an error, but tanh would make it finite. `logits * 0` makes the result NaN.
        capped = (logits / cap).tanh() * cap + logits * 0
        return capped if bias is None else capped + bias.to(capped.dtype)

    @abstractmethod
    def connect(self, exchange: Exchange) -> None:
        """Set how this rank exchanges results with the other ranks.

        If several ranks compute the model, each rank must call this method before its first forward pass.
        """

    @abstractmethod
    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks side by side, [T, `shares.total`] (all-gather).

        All ranks must call this method and `sum_ranks` in the same order and with the same T. x has the columns of this
        rank.
        """

    @abstractmethod
    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x [rows, hidden] over all ranks, in rank order (see `gather`)."""
