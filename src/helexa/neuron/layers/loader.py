"""The loader: reads tensors of a checkpoint and prepares them for the kernels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.embedding import Embedding
from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.ops.mixture import Clamp, Expert, MixtureOp, Routing
from helexa.neuron.ops.norm import NormOp
from helexa.neuron.ops.protocol import MatrixStore, Ops
from helexa.neuron.processes import heartbeat
from helexa.neuron.weights.checkpoint import Checkpoint
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.quantization.quant_policy import QuantPolicy


class Loader:
    """Reads tensors of a checkpoint by name, and prepares them for the kernels.

    Every tensor must have the shape that the configuration implies. Native kernels use these shapes without further
    checks.

    Args:
        ops: kernels to prepare the weights for.
        on_read: called after each read with the total bytes of weights read so far.
        store: disk cache of matrices that an earlier start of the engine prepared; None to prepare all matrices.
        policy: which matrices to quantize, and to which format; None for no quantization.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        on_read: Callable[[int], None],
        store: MatrixStore | None = None,
        policy: QuantPolicy | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self._names = frozenset(checkpoint.names())
        self._store = store
        self._policy = policy
        self._on_read = on_read
        self._read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def weight(self, name: str, shape: tuple[int, ...], index: int | None = None) -> Weight:
        """Return a tensor as the checkpoint stores it: a plain tensor, or a groupwise quantized tensor.

        The tensor may be a view of the mapped file (see `Checkpoint`). The caller must copy a tensor that it uses
        after loading.

        Args:
            shape: shape that the whole tensor must have.
            index: index of one matrix in a tensor [E, N, K]; None for the whole tensor.

        Raises:
            ModelFileError: the tensor is missing or has another shape.
        """
        require_shape(name, self.checkpoint.shape(name), shape)
        weight = self.checkpoint.read(name) if index is None else self.checkpoint.read(name, index)
        self._read += _nbytes(weight)
        heartbeat.beat()
        self._on_read(min(self._read, self.checkpoint.total_bytes))  # fp8 weights grow when they are read
        return weight

    def matrix(self, name: str, shape: tuple[int, ...], index: int | None = None) -> Any:
        """Return a matrix [N, K], quantized by the policy and prepared for the kernels.

        Args:
            shape: shape that the whole tensor `name` must have.
            index: index of the matrix in a tensor [E, N, K]; None if the tensor is the matrix.
        """
        require_shape(name, self.checkpoint.shape(name), shape)
        key = name if index is None else f"{name}#{index}"
        return self.prepared(key, shape[-2:], lambda: self.weight(name, shape, index))

    def prepared(self, key: str, shape: tuple[int, ...], read: Callable[[], Weight]) -> Any:
        """Return the matrix that `read` reads, quantized by the policy and prepared for the kernels.

        If the store already has the prepared matrix, `read` is not called.

        Args:
            key: unique name of the matrix in the model, used as the name in the store.
            shape: shape of the matrix, [N, K].
        """
        stored = None if self._store is None else self._store.get(key, shape)
        if stored is not None:
            return stored
        weight = read()
        require_shape(key, tuple(weight.shape), shape)
        matrix = self.ops.matrix(weight, None if self._policy is None else self._policy.form(key, shape[-1]))
        heartbeat.beat()
        if isinstance(weight, Tensor) and matrix is weight:
            matrix = weight.clone()
        if self._store is not None:
            self._store.add(key, matrix)
        return matrix

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as float32 on the device, without quantization; for small tensors such as biases."""
        weight = self.weight(name, shape)
        if isinstance(weight, GroupwiseTensor):
            return weight.dequantize(torch.float32).to(self.ops.device)
        return weight.to(self.ops.device, torch.float32, copy=True)

    def vector(self, name: str, width: int) -> Tensor:
        """Return the one-dimensional tensor `name` with `width` numbers, as float32 on the device."""
        return self.plain(name, (width,))

    def norm(self, name: str, width: int, eps: float, offset: float = 0.0) -> NormOp:
        """Return an RMS norm with the weight `name.weight` [width].

        Args:
            offset: number to add to the weight. Some models, such as Gemma, store the weight minus 1.
        """
        return self.ops.rms_norm(self.vector(f"{name}.weight", width) + offset, eps)

    def linear(self, outputs: Mapping[str, int], inputs: int, gate: str | None = None) -> LinearOp:
        """Return a linear operator for one or several weights with the same input.

        The operator concatenates the outputs of all weights.

        Args:
            outputs: name of each linear layer and its number of outputs. The checkpoint has `name.weight`
                [outputs, inputs], and optionally `name.bias`.
            gate: activation of a gated input, `silu` or `gelu_tanh`. The operator then takes 2 * `inputs` numbers per
                row, and multiplies the second half by the activation of the first half. None for no gate.
        """
        return self.product(*self.matrices(outputs, inputs), gate)

    def product(self, matrices: Sequence[Any], bias: Tensor | None, gate: str | None = None) -> LinearOp:
        """Return a linear operator for matrices that are already prepared (see `Ops.linear`)."""
        return self.ops.linear(matrices, bias, gate)

    def mixture(self, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None = None) -> MixtureOp:
        """Return the operator of a mixture of experts (see `Ops.mixture`)."""
        return self.ops.mixture(experts, routing, clamp)

    def matrices(self, outputs: Mapping[str, int], inputs: int) -> tuple[list[Any], Tensor | None]:
        """Return the prepared matrices of several linear layers, and their concatenated biases.

        The biases are None if no layer has a bias. A layer without a bias otherwise has zeros.

        Args:
            outputs: name of each linear layer and its number of outputs.
        """
        matrices = [self.matrix(f"{name}.weight", (rows, inputs)) for name, rows in outputs.items()]
        biases = [
            self.vector(f"{name}.bias", width) if f"{name}.bias" in self else None for name, width in outputs.items()
        ]
        bias = None
        if any(vector is not None for vector in biases):
            widths = zip(outputs.values(), biases, strict=True)
            bias = torch.cat(
                [torch.zeros(width, device=self.ops.device) if vector is None else vector for width, vector in widths]
            )
        return matrices, bias

    def embedding(self, name: str, width: int) -> Embedding:
        """Return the token embedding with the weight `name.weight` [vocabulary, width].

        The vocabulary size is the tensor's number of rows; the configuration's `vocab_size` is ignored.
        """
        name = f"{name}.weight"
        vocab_size = self.checkpoint.shape(name)[0]
        return Embedding(self.ops, self.matrix(name, (vocab_size, width)), vocab_size)


def require_shape(name: str, actual: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise a ModelFileError if the shape `actual` of the tensor `name` differs from the required `shape`."""
    if actual != shape:
        raise ModelFileError(f"tensor {name} has shape {list(actual)}, but the configuration requires {list(shape)}")


def _nbytes(weight: Weight) -> int:
    if isinstance(weight, GroupwiseTensor):
        return weight.codes.numel() * weight.bits // 8
    return weight.nbytes
