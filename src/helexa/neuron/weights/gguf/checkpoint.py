"""Open a GGUF model as a checkpoint with the tensor names, configuration and tensor layout of Hugging Face."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.formats import GroupwiseTensor, Weight
from helexa.neuron.weights.gguf.blocks import PLAIN_TYPES, SUPPORTED_TYPES, decode, growth
from helexa.neuron.weights.gguf.config import gguf_config
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.gguf.header import GgufTensor
from helexa.neuron.weights.gguf.layout import GgufLayout
from helexa.neuron.weights.gguf.names import hugging_face_name, layer_of
from helexa.neuron.weights.part import WHOLE, Part, block_numbers

_log = logging.getLogger("helexa.neuron.weights")
_WARNING_GROWTH = 1.25


class GgufCheckpoint:
    """The `Checkpoint` of a GGUF model.

    Tensors have the names, shapes and values of a text-only Hugging Face model, except for the experts of a layer. The
    E experts of a layer are three tensors: `mlp.experts.gate_proj.weight` and `mlp.experts.up_proj.weight` [E, I, H],
    and `mlp.experts.down_proj.weight` [E, H, I]. H is the hidden size, and I is the intermediate size of an expert.

    The experts of gpt_oss models also have biases, such as `mlp.experts.gate_proj.bias` [E, I]. Unlike in Hugging
    Face's gpt_oss models, gate and up are separate tensors, and no tensor is transposed.
    """

    def __init__(self, path: Path) -> None:
        """Open the GGUF file at `path`. If the model is split into several files, open all files.

        Raises:
            ModelFileError: the file is invalid, or a tensor type or the model architecture is not supported.
        """
        self._file = GgufFile.open(path)
        self.config: dict[str, Any] = gguf_config(self._file)
        self._layout = GgufLayout(self._file.architecture, self.config)
        self._tensors = self._translate_names()
        self._require_supported()
        self.total_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        # by type, whether scaled, whether columns are in another order, and shape
        self._on_meta: dict[tuple[GgmlType, bool, bool, tuple[int, ...]], Weight] = {}
        self._warn_of_growth()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the Hugging Face names of the tensors, in the order of the file."""
        return list(self._tensors)

    def stored_name(self, name: str) -> str:
        """Return the name of tensor `name` in the file."""
        return self._find(name).name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name` in Hugging Face's layout."""
        return self._layout.shape(name, self._find(name).shape)

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return tensor `name`, or a part of it, in Hugging Face's layout. With `index`, read one matrix of a stack.

        Rows and columns are selected before the values are decoded. If the columns are not whole quantization blocks of
        the file, all columns of the rows are decoded first.
        """
        tensor = self._find(name)
        shape = self.shape(name) if index is None else tensor.shape[1:]
        rows = _compose(self._layout.rows(name, shape), part.rows)
        columns = _compose(self._layout.columns(name, shape), part.columns)
        blocks = None if columns is None else block_numbers(columns, BLOCK_SIZES[tensor.type][0])
        is_row = len(tensor.shape) == 1 < len(shape)  # the file has a vector instead of a matrix with one row
        stored = self._file.read(tensor.name, index, Part(blocks) if is_row else Part(rows, blocks))
        decoded = Part(rows, None if blocks is None else columns)
        weight = self._apply_scale(decode(tensor.type, stored, decoded.shape(shape)), tensor, index)
        if columns is not None and blocks is None:
            weight = weight[:, columns] if isinstance(weight, Tensor) else weight.columns(columns)
        return self._layout.restore(name, weight)

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` on torch's meta device, in the format that `read` returns for tensor `name`."""
        tensor, columns = self._find(name), shape[-1]
        order = self._layout.columns(name, tensor.shape)
        key = (tensor.type, self._find_scale(tensor) is not None, order is not None, shape)
        if key not in self._on_meta:
            elements, nbytes = BLOCK_SIZES[tensor.type]
            if columns % elements and order is None:
                raise ModelFileError(
                    f"{self._file.path.name}: {columns} columns of {name} do not divide into blocks of {elements}"
                )
            width = columns if order is None else len(order)
            stored = np.zeros(width // elements * nbytes, np.uint8)
            row = self._apply_scale(decode(tensor.type, stored, (1, width)), tensor, 0)
            if order is not None and isinstance(row, GroupwiseTensor):
                row = row.columns(order[:columns])
            plain = isinstance(row, Tensor)
            self._on_meta[key] = torch.empty(shape, dtype=row.dtype, device="meta") if plain else row.on_meta(shape[0])
        return self._on_meta[key]

    def column_block(self, name: str) -> int:
        """Return the number of adjacent columns of tensor `name` that must be read together."""
        tensor = self._find(name)
        elements = BLOCK_SIZES[tensor.type][0]
        order = self._layout.columns(name, tensor.shape)
        return elements if order is None or block_numbers(order, elements) is not None else 1

    def close(self) -> None:
        """Close the model's files."""
        self._file.close()

    def _find(self, name: str) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self._file.path.name}: no tensor {name}")
        return tensor

    def _translate_names(self) -> dict[str, GgufTensor]:
        architecture, layers = self._file.architecture, self.config["num_hidden_layers"]
        drafting = range(layers, layers + self.config.get("num_nextn_predict_layers", 0))
        tensors: dict[str, GgufTensor] = {}
        skipped: list[str] = []
        for name, tensor in self._file.tensors.items():
            if layer_of(name) in drafting:
                skipped.append(name)
            elif not self._is_scale(name):
                # A tensor without a Hugging Face name keeps its name, so that loading the model reports it as unread.
                tensors[hugging_face_name(architecture, name, layers) or name] = tensor
        if skipped:
            names = ", ".join(skipped[:3]) + (" .." if len(skipped) > 3 else "")
            _log.info("%s: skipped %d tensors of multi-token prediction: %s", self._file.path.name, len(skipped), names)
        return tensors

    def _is_scale(self, name: str) -> bool:
        """Return whether the tensor `name` has the scales of another tensor (NVFP4). `.input_scale` is not needed."""
        stem, _, kind = name.rpartition(".")
        return kind in ("scale", "input_scale") and f"{stem}.weight" in self._file.tensors

    def _require_supported(self) -> None:
        for tensor in self._tensors.values():
            if tensor.type not in SUPPORTED_TYPES:
                problem = f"unsupported tensor type {tensor.type.name} in {tensor.name}"
            elif len(tensor.shape) == 1 and tensor.type not in PLAIN_TYPES:
                problem = f"tensor {tensor.name} is a vector of type {tensor.type.name}, expected a matrix"
            else:
                continue
            raise ModelFileError(f"{self._file.path.name}: {problem}")

    def _find_scale(self, tensor: GgufTensor) -> GgufTensor | None:
        scale = self._file.tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
        return None if scale is tensor else scale

    def _apply_scale(self, weight: Weight, tensor: GgufTensor, index: int | None) -> Weight:
        """Multiply `weight` by the tensor's `.scale` tensor, if the file contains one (NVFP4).

        A `.scale` tensor has a single number, or one number per matrix of a stack of matrices.
        """
        scale = self._find_scale(tensor)
        if scale is None:
            return weight
        count = tensor.shape[0] if len(tensor.shape) > 2 else 1
        if scale.type is not GgmlType.F32 or scale.shape != (count,):
            raise ModelFileError(f"{self._file.path.name}: tensor {scale.name} is not {count} numbers of float32")
        numbers = torch.from_numpy(self._file.read(scale.name)).view(torch.float32)
        if index is not None:
            numbers = numbers[index : index + 1]

        def times(unit: Tensor) -> Tensor:
            return unit.float() * numbers.view(-1, *[1] * (unit.ndim - 1))

        if isinstance(weight, Tensor):
            return times(weight)
        minimum = None if weight.minimum is None else replace(weight.minimum, unit=times(weight.minimum.unit))
        return replace(weight, scale=replace(weight.scale, unit=times(weight.scale.unit)), minimum=minimum)

    def _warn_of_growth(self) -> None:
        """Log a warning for each tensor type whose tensors are much larger in memory than in the file."""
        for kind in sorted({tensor.type for tensor in self._tensors.values()}):
            factor = growth(kind)
            if factor > _WARNING_GROWTH:
                _log.warning(
                    "%s: weights of type %s take %.1f times as much memory as in the file",
                    self._file.path.name,
                    kind.name,
                    factor,
                )


def _compose(order: NDArray[np.int64] | None, chosen: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Return the numbers in the file of the rows (or columns) `chosen`, if the file has the order `order`."""
    return chosen if order is None else order if chosen is None else order[chosen]
