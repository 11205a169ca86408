"""Open the vision part of a model's files as a checkpoint."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.block_formats import StoredTensor, stored_tensors
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.gguf.blocks import SUPPORTED_TYPES, decode
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES
from helexa.neuron.weights.gguf.header import GgufTensor
from helexa.neuron.weights.part import WHOLE, Part
from helexa.neuron.weights.safetensors_file import file_tensors
from helexa.neuron.weights.vision.config import VisionConfig, read_vision_config
from helexa.neuron.weights.vision.mmproj import hugging_face_names, mmproj_beside

_QWEN = re.compile(r"(?:model\.)?visual\.(?P<rest>.+)")
_SIGLIP = re.compile(
    r"(?:model\.)?(?:vision_tower\.(?:vision_model\.)?|vision_model\.)(?P<rest>(?!head\.).+)"
    r"|(?:model\.)?(?P<projector>(?:multi_modal_projector|connector)\..+)"
)
_PATCHES = "patch_embed.proj.weight"
_SHIFTED_NORM = "multi_modal_projector.mm_soft_emb_norm.weight"


class VisionCheckpoint:
    """The `Checkpoint` of a model's vision part.

    Tensors have the names of Hugging Face without the prefix of the vision part: `blocks.0.attn.qkv.weight` instead of
    `model.visual.blocks.0.attn.qkv.weight`. The names of projectors begin with `multi_modal_projector.` or
    `connector.`.

    Attributes:
        config: see `VisionConfig.config`.
        preprocessor: see `VisionConfig.preprocessor`.
        total_bytes: total size of the tensors in the files, in bytes.
    """

    def __init__(self, settings: VisionConfig, tensors: Mapping[str, StoredTensor], files: ExitStack) -> None:
        self.config: dict[str, Any] = settings.config
        self.preprocessor = settings.preprocessor
        self._tensors = tensors
        self._files = files
        self.total_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the names of the tensors of the vision part."""
        return list(self._tensors)

    def stored_name(self, name: str) -> str:
        """Return `name`: the names of a vision part are reported without the prefix of the files."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self._find(name).shape

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return tensor `name` (see `Checkpoint.read`)."""
        return self._find(name).read(index, part)

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` on torch's meta device, in the format that `read` returns for tensor `name`."""
        return self._find(name).on_meta(shape)

    def column_block(self, name: str) -> int:
        """Return the number of adjacent columns of tensor `name` that must be read together."""
        return self._find(name).column_block

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _find(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"no tensor {name} in the vision part of the model")
        return tensor


def open_vision_checkpoint(model: Path, mmproj: Path | None = None) -> VisionCheckpoint | None:
    """Open the vision part of the model at `model`; return None if the model has no vision part.

    `read_vision_config` describes the arguments and errors.
    """
    settings = read_vision_config(model, mmproj)
    if settings is None:
        return None
    if mmproj is None and model.is_dir() and any(model.glob("*.safetensors")):
        return _open_folder(model, settings)
    file = mmproj or mmproj_beside(model)
    assert file is not None, "read_vision_config found no file"
    return _open_mmproj(GgufFile.open(file), settings)


def _open_folder(folder: Path, settings: VisionConfig) -> VisionCheckpoint:
    pattern = _QWEN if settings.config["model_type"].startswith("qwen") else _SIGLIP
    tensors = file_tensors(folder)
    matches = {name: match for name in tensors if (match := pattern.fullmatch(name))}
    named = {match.groupdict().get("projector") or match["rest"]: tensors[name] for name, match in matches.items()}
    if len(named) != len(matches):
        raise ModelFileError(f"{folder.name}: two tensors of the vision part have the same name")
    files = ExitStack()
    for file in {tensor.file.path: tensor.file for tensor in named.values()}.values():
        files.callback(file.close)
    # `stored_tensors` changes the configuration that it receives.
    return VisionCheckpoint(settings, stored_tensors(named, dict(settings.config)), files)


def _open_mmproj(file: GgufFile, settings: VisionConfig) -> VisionCheckpoint:
    files = ExitStack()
    files.callback(file.close)
    stored: dict[str, StoredTensor] = {}
    for gguf_name, name in hugging_face_names(file).items():
        tensor = file.tensors[gguf_name]
        if tensor.type not in SUPPORTED_TYPES:
            raise ModelFileError(f"{file.path.name}: unsupported tensor type {tensor.type.name} in {gguf_name}")
        stored[name] = _GgufStored(file, tensor, -1.0 if name == _SHIFTED_NORM else 0.0)
    second = stored.pop(f"{_PATCHES}.1", None)
    if second is not None:
        stored[_PATCHES] = _TimeSteps((stored[_PATCHES], second))
    return VisionCheckpoint(settings, stored, files)


@dataclass(frozen=True)
class _GgufStored:
    """A tensor of an `mmproj` file; implements `StoredTensor`.

    Attributes:
        shift: number to add to the values. 0 to keep the stored values.
    """

    file: GgufFile
    tensor: GgufTensor
    shift: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def column_block(self) -> int:
        return BLOCK_SIZES[self.tensor.type][0]

    def read(self, index: int | None = None, part: Part = WHOLE) -> Weight:
        whole = index is None and part.rows is None and part.columns is None
        assert whole, "each rank reads whole tensors of a vision part"
        weight = decode(self.tensor.type, self.file.read(self.tensor.name), self.shape)
        return weight.float() + self.shift if self.shift and isinstance(weight, Tensor) else weight

    def on_meta(self, shape: tuple[int, ...]) -> Weight:
        elements, nbytes = BLOCK_SIZES[self.tensor.type]
        if shape[-1] % elements:
            raise ModelFileError(f"{self.tensor.name}: {shape[-1]} columns do not divide into blocks of {elements}")
        row = decode(self.tensor.type, np.zeros(shape[-1] // elements * nbytes, np.uint8), (1, shape[-1]))
        return torch.empty(shape, dtype=row.dtype, device="meta") if isinstance(row, Tensor) else row.on_meta(shape[0])


@dataclass(frozen=True)
class _TimeSteps:
    """The weights of a patch embedding, whose time steps are separate tensors; implements `StoredTensor`.

    Attributes:
        steps: the tensor of each time step, [N, channels, rows, columns].
    """

    steps: tuple[StoredTensor, StoredTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, channels, *patch = self.steps[0].shape
        return (outputs, channels, len(self.steps), *patch)

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @property
    def column_block(self) -> int:
        return 1

    def read(self, index: int | None = None, part: Part = WHOLE) -> Weight:
        return torch.stack([_plain(step.read(index, part)) for step in self.steps], dim=2)

    def on_meta(self, shape: tuple[int, ...]) -> Weight:
        return torch.empty(shape, device="meta")


def _plain(weight: Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()
