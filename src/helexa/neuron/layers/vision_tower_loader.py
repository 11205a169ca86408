"""Read the weights of a vision tower, with the padding that the kernels need."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from helexa.neuron import tensors
from helexa.neuron.layers.loader import Loader, require_shape
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import LinearOp, NormOp
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight

CHANNELS = 3

_GROUP = 32  # the kernels compute inputs in groups of 32 numbers


class Blocks(NamedTuple):
    """The outputs of a vision tower's linear layer as equal blocks, each padded."""

    number: int  # number of blocks
    size: int  # number of outputs of a block in the checkpoint
    padded: int  # number of outputs of a block with padding. The weights and biases of the padding are 0.


def padded_width(width: int) -> int:
    """Return `width`, rounded up to a multiple of the kernels' group size, 32."""
    return -(-width // _GROUP) * _GROUP


class TowerLoader:
    """Builds the layers of a vision tower; one rank computes the whole tower."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader  # loader of the checkpoint with the vision part

    @property
    def ops(self) -> Ops:
        """The kernels of the engine's device."""
        return self._loader.ops

    @property
    def matrix_bytes(self) -> int:
        """Total bytes of the matrices that this loader has returned."""
        return self._loader.matrix_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._loader

    def linear(self, name: str, outputs: int, inputs: int) -> LinearOp:
        """Return a linear layer: `name.weight` [outputs, inputs], optional `name.bias`."""
        return self.padded_linear([name], Blocks(1, outputs, outputs), inputs, inputs)

    def padded_linear(
        self, names: Sequence[str], outputs: Blocks, inputs: int, padded_inputs: int, order: Tensor | None = None
    ) -> LinearOp:
        """Return a linear layer that concatenates the padded outputs of several weights.

        Args:
            names: for each weight, its name. The tensor `name.weight` has the shape [number * size, inputs]. Either all
                weights have a bias `name.bias` or none.
            padded_inputs: number of inputs. Inputs after the first `inputs` are multiplied by 0.
            order: for each output of a block, the index of its row in the block. Only for weights without a bias.

        Raises:
            ModelFileError: a tensor is missing, for example the bias of one of several weights, or cannot be read, or
                has a wrong shape.
        """
        matrices = [self._matrix(f"{name}.weight", outputs, inputs, padded_inputs, order) for name in names]
        has_bias = any(f"{name}.bias" in self for name in names)
        bias = tensors.cat([self._bias(f"{name}.bias", outputs) for name in names]) if has_bias else None
        return self._loader.product(matrices, bias)

    def transposed_linear(self, name: str, inputs: int) -> LinearOp:
        """Return a linear layer without a bias for the tensor `name` [inputs, outputs]."""
        outputs = self.width(name)
        matrix = self._loader.prepared(name, (outputs, inputs), lambda: self._read(name, (inputs, outputs)).T)
        return self._loader.product([matrix], None)

    def patch_embedding(
        self, name: str, outputs: int, patch_size: int, steps: int | None = None, *, flat: bool = False
    ) -> LinearOp:
        """Return the linear layer that computes the embeddings of patches.

        The inputs are the values of a patch in the order channel, row, column, padded to `padded_width`.

        Args:
            name: the tensor `name.weight` is the kernel of a convolution, [outputs, channels, rows, columns], or
                [outputs, channels, steps, rows, columns] if `steps` is given. It may also be a matrix whose columns are
                in the order row, column, channel.
            steps: number of time steps of the kernel; None for a kernel without time steps.
            flat: whether `name.weight` is a matrix whose columns are in the order step, channel, row, column.
        """
        weight, values = f"{name}.weight", CHANNELS * patch_size**2
        is_matrix = len(self._loader.checkpoint.shape(weight)) == 2 and not flat
        shape = (outputs, CHANNELS, *([] if steps is None else [steps]), patch_size, patch_size)
        shape = (outputs, values) if is_matrix else (outputs, values * (steps or 1)) if flat else shape

        def read() -> Tensor:
            kernel = self._read(weight, shape)
            if is_matrix:
                kernel = kernel.view(outputs, patch_size**2, CHANNELS).transpose(1, 2)
            # A still image has the same values in all time steps, so the weights of the steps are added.
            if flat:
                kernel = kernel.view(outputs, -1, values).sum(dim=1)
            elif steps is not None:
                kernel = kernel.sum(dim=2)
            return tensors.pad(kernel.flatten(1), (0, padded_width(values) - values))

        require_shape(weight, self._loader.checkpoint.shape(weight), shape)
        matrix = self._loader.prepared(weight, (outputs, padded_width(values)), read)
        bias = self.vector(f"{name}.bias", outputs) if f"{name}.bias" in self else None
        return self._loader.product([matrix], bias)

    def width(self, name: str) -> int:
        """Return the number of columns of the tensor `name`."""
        return self._loader.checkpoint.shape(name)[-1]

    def rows(self, name: str) -> int:
        """Return the number of rows of the tensor `name`."""
        return self._loader.checkpoint.shape(name)[0]

    def layer_norm(self, name: str, width: int, eps: float) -> NormOp:
        """Return a layer norm with `name.weight` and `name.bias`, each [width]."""
        return self.ops.layer_norm(self.vector(f"{name}.weight", width), self.vector(f"{name}.bias", width), eps)

    def rms_norm(self, name: str, width: int, eps: float, offset: float = 0.0) -> NormOp:
        """Return an RMS norm with the weight `name.weight` [width] plus `offset`."""
        return self._loader.norm(name, width, eps, offset)

    def vector(self, name: str, width: int) -> Tensor:
        """Return the tensor `name` of shape [width] in float32 on the device."""
        return self._loader.vector(name, width)

    def table(self, name: str, *shape: int) -> Tensor:
        """Return the tensor `name` of the given shape in float32 on the device."""
        return self._loader.plain(name, shape)

    def scalar(self, name: str) -> float:
        """Return the tensor `name`, which has one number and at most one dimension."""
        shape = self._loader.checkpoint.shape(name)
        require_shape(name, shape, () if not shape else (1,))
        return float(self._loader.plain(name, shape).flatten()[0])

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._loader.weight(name, shape)
        return weight.dequantize() if isinstance(weight, GroupwiseTensor) else weight.float()

    def _matrix(self, name: str, outputs: Blocks, inputs: int, padded_inputs: int, order: Tensor | None) -> Any:
        shape = outputs.number * outputs.size, inputs

        def read() -> Weight:
            # A quantized weight needs no padding, because its number of columns is a multiple of the group size.
            padding = padded_inputs - inputs
            weight = tensors.pad(self._read(name, shape), (0, padding)) if padding else self._loader.weight(name, shape)
            if order is not None:
                rows = (tensors.arange(outputs.number)[:, None] * outputs.size + order).flatten()
                weight = weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)
            return _pad_blocks(weight, outputs)

        require_shape(name, self._loader.checkpoint.shape(name), shape)
        return self._loader.prepared(name, (outputs.number * outputs.padded, padded_inputs), read)

    def _bias(self, name: str, outputs: Blocks) -> Tensor:
        bias = _pad_blocks(self.vector(name, outputs.number * outputs.size), outputs)
        assert isinstance(bias, Tensor)
        return bias


def _pad_blocks(weight: Weight, blocks: Blocks) -> Weight:
    """Return a weight or bias with padded blocks of rows; the new rows are 0."""
    if blocks.size == blocks.padded:
        return weight

    def pad(tensor: Tensor) -> Tensor:
        rows = tensor.unflatten(0, (blocks.number, blocks.size))
        padding = rows.new_zeros((blocks.number, blocks.padded - blocks.size, *tensor.shape[1:]))
        return tensors.cat((rows, padding), dim=1).flatten(0, 1)

    return pad(weight) if isinstance(weight, Tensor) else weight.each(pad)
