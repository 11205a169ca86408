"""Open a GGUF model as a checkpoint with Hugging Face's names and layout."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from helexa.core.errors import ModelFileError
from helexa.core.logs import quoted
from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.gguf.blocks import PLAIN_TYPES, SUPPORTED_TYPES, decode, growth
from helexa.neuron.weights.gguf.config import gguf_config
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.gguf.header_and_metadata_reader import GgufTensor
from helexa.neuron.weights.gguf.layout import GgufLayout, hugging_face_name, layer_of
from helexa.neuron.weights.model_file import WHOLE, Part, block_numbers
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight

_log = logging.getLogger("helexa.neuron.weights")
_WARNING_GROWTH = 1.25  # size in memory, relative to the size in the file, above which a warning is logged
_PREDICTION = ".nextn."  # in the name of a tensor that only layers of multi-token prediction have
# Prefixes of tensors that Ollama's converter adds to a model's file: the encoder of images, and multi-token prediction.
# Answers to texts do not depend on these tensors. The converter's files of other architectures are not supported,
# because they also have other keys.
_ADDED_BY_OLLAMA = ("v.", "mtp.")
_OLLAMA_ARCHITECTURES = ("qwen35", "qwen35moe")


class GgufCheckpoint:
    """The `Checkpoint` of a GGUF model.

    Tensors have the names, shapes and values of a text-only Hugging Face model, except for the experts of a layer. The
    E experts of a layer are three tensors: `mlp.experts.gate_proj.weight` and `mlp.experts.up_proj.weight` [E, I, H],
    and `mlp.experts.down_proj.weight` [E, H, I]. H is the hidden size, and I is the intermediate size of an expert.

    The experts of gpt_oss models also have biases, such as `mlp.experts.gate_proj.bias` [E, I]. Unlike in Hugging
    Face's gpt_oss models, gate and up are separate tensors, and no tensor is transposed.
    """

    def __init__(self, path: Path) -> None:
        """Open the GGUF file at `path`, and all other files of a split model.

        Raises:
            ModelFileError: the file is invalid, or a tensor type or the model architecture is not supported.
        """
        self._file = GgufFile.open(path)
        self.config: dict[str, Any] = gguf_config(self._file)
        self._layout = GgufLayout(self._file.architecture, self.config)
        self._tensors = self._translate_names()
        self._require_supported()
        self.total_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        # meta weights by type, whether scaled, whether columns are reordered, and shape
        self._on_meta: dict[tuple[GgmlType, bool, bool, tuple[int, ...]], Weight] = {}
        # Weights may take more memory than in the file. A model may therefore not fit into memory although its file is
        # smaller than the memory.
        self._warn_of_growth()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the tensors' names, in the order of the file (see `Checkpoint.names`)."""
        return list(self._tensors)

    def stored_name(self, name: str) -> str:
        """Return the name of tensor `name` in the file."""
        return self._find(name).name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name` in Hugging Face's layout."""
        return self._layout.shape(name, self._find(name).shape)

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return tensor `name`, or a part of it, in Hugging Face's layout."""
        tensor = self._find(name)
        shape = self.shape(name) if index is None else tensor.shape[1:]
        rows = _compose(self._layout.rows(name, shape), part.rows)
        columns = _compose(self._layout.columns(name, shape), part.columns)
        blocks = None if columns is None else block_numbers(columns, BLOCK_SIZES[tensor.type][0])
        if index is None and len(shape) == 1 < len(tensor.shape):  # the file has a matrix instead of a vector
            matrix = decode(tensor.type, self._file.read(tensor.name), tensor.shape)
            vector = (matrix if isinstance(matrix, Tensor) else matrix.dequantize()).flatten()
            return self._layout.restore(name, vector if rows is None else vector[rows])
        is_row = len(tensor.shape) == 1 < len(shape)  # the file has a vector instead of a matrix with one row
        stored = self._file.read(tensor.name, index, Part(blocks) if is_row else Part(rows, blocks))
        decoded = Part(rows, None if blocks is None else columns)
        weight = self._apply_scale(decode(tensor.type, stored, decoded.shape(shape)), tensor, index)
        # If `columns` are not whole blocks of the file, all columns were decoded. Choose `columns` from them.
        if columns is not None and blocks is None:
            weight = weight[:, columns] if isinstance(weight, Tensor) else weight.columns(columns)
        return self._layout.restore(name, weight)

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` on the meta device, in the format of `read(name)`."""
        tensor, columns = self._find(name), shape[-1]
        order = self._layout.columns(name, tensor.shape)
        key = (tensor.type, self._find_scale(tensor) is not None, order is not None, shape)
        # The format is that of one decoded row. It is cached, because the tensors of a model have few formats.
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
            self._on_meta[key] = (
                tensors.empty(shape, dtype=row.dtype, device="meta") if plain else row.on_meta(shape[0])
            )
        return self._on_meta[key]

    def column_block(self, name: str) -> int:
        """Return how many adjacent columns of tensor `name` must be read together."""
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
            raise ModelFileError(f"{self._file.path.name}: the file has no tensor {name}")
        return tensor

    def _translate_names(self) -> dict[str, GgufTensor]:
        architecture, layers = self._file.architecture, self.config["num_hidden_layers"]
        drafting = range(layers, layers + self.config.get("num_nextn_predict_layers", 0))
        named: dict[str, GgufTensor] = {}
        skipped: list[str] = []
        added = 0
        for name, tensor in self._file.tensors.items():
            if layer_of(name) in drafting:
                skipped.append(name)
            elif name.startswith(_ADDED_BY_OLLAMA) and architecture in _OLLAMA_ARCHITECTURES:
                added += 1
            elif not self._is_scale(name):
                # A tensor without a Hugging Face name keeps its name, so that loading the model reports it as unread.
                named[hugging_face_name(architecture, name, layers) or name] = tensor
        if skipped and not any(_PREDICTION in name for name in skipped):
            raise ModelFileError(
                f"{self._file.path.name}: the last {len(drafting)} of {drafting.stop} layers should be layers of "
                f"multi-token prediction (nextn_predict_layers), but have the tensors of decoder layers, such as "
                f"{skipped[0]}",
                advice="convert the model again",
            )
        if skipped:
            fields = (quoted(self._file.path), len(skipped), ",".join(skipped[:3]))
            _log.info("tensors of multi-token prediction skipped path=%s tensors=%d first=%s", *fields)
        if added:
            _log.warning(
                "extra tensors in a GGUF file skipped path=%s tensors=%d; "
                "the model reads no images and drafts no tokens with them",
                quoted(self._file.path),
                added,
            )
        return named

    def _is_scale(self, name: str) -> bool:
        """Return whether the tensor `name` contains the scales of another tensor (NVFP4)."""
        stem, _, kind = name.rpartition(".")
        # `.input_scale` is only for kernels that quantize activations to NVFP4, too.
        if kind not in ("scale", "input_scale") or f"{stem}.weight" not in self._file.tensors:
            return False
        # In Gemma 4, two tensors with this ending are parameters of the router.
        return hugging_face_name(self._file.architecture, name, self.config["num_hidden_layers"]) is None

    def _require_supported(self) -> None:
        for tensor in self._tensors.values():
            if tensor.type not in SUPPORTED_TYPES:
                problem = f"unsupported tensor type {tensor.type.name} in {tensor.name}"
            elif len(tensor.shape) == 1 and tensor.type not in PLAIN_TYPES:
                problem = f"tensor {tensor.name} is a vector of type {tensor.type.name}, expected a matrix"
            else:
                continue
            raise ModelFileError(f"{self._file.path.name}: {problem}", advice="load another file, such as Q4_K_M")

    def _find_scale(self, tensor: GgufTensor) -> GgufTensor | None:
        name = f"{tensor.name.removesuffix('.weight')}.scale"
        return self._file.tensors.get(name) if name != tensor.name and self._is_scale(name) else None

    def _apply_scale(self, weight: Weight, tensor: GgufTensor, index: int | None) -> Weight:
        """Multiply `weight` by the tensor's `.scale` tensor, if there is one (NVFP4)."""
        scale = self._find_scale(tensor)
        if scale is None:
            return weight
        # The tensor of scales has one number, or one per matrix of a stack.
        count = tensor.shape[0] if len(tensor.shape) > 2 else 1
        if scale.type is not GgmlType.F32 or scale.shape != (count,):
            raise ModelFileError(
                f"{self._file.path.name}: tensor {scale.name} is {scale.type.name} {list(scale.shape)}, expected F32 "
                f"[{count}]"
            )
        numbers = tensors.from_numpy(self._file.read(scale.name)).view(tensors.float32)
        if index is not None:
            numbers = numbers[index : index + 1]

        def times(unit: Tensor) -> Tensor:
            return unit.float() * numbers.view(-1, *[1] * (unit.ndim - 1))

        if isinstance(weight, Tensor):
            return times(weight)
        minimum = None if weight.minimum is None else replace(weight.minimum, unit=times(weight.minimum.unit))
        return replace(weight, scale=replace(weight.scale, unit=times(weight.scale.unit)), minimum=minimum)

    def _warn_of_growth(self) -> None:
        """Log a warning for each tensor type that is much larger in memory."""
        for kind in sorted({tensor.type for tensor in self._tensors.values()}):
            factor = growth(kind)
            if factor > _WARNING_GROWTH:
                _log.warning(
                    "weights of a GGUF type take more memory than in the file path=%s type=%s times=%.1f; "
                    "if memory is short, use a file of another type",
                    quoted(self._file.path),
                    kind.name,
                    factor,
                )


def _compose(order: NDArray[np.int64] | None, chosen: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Return the numbers in the file of the chosen rows or columns: `order[chosen]`.

    None stands for all rows or columns in the order of the file.
    """
    return chosen if order is None else order if chosen is None else order[chosen]
