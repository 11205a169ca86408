"""Open the vision part of a model's files as a checkpoint."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.gguf.blocks import SUPPORTED_TYPES, decode
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES
from helexa.neuron.weights.gguf.header_and_metadata_reader import GgufTensor
from helexa.neuron.weights.gguf.layout import halves
from helexa.neuron.weights.gguf.mmproj import hugging_face_names, interleaved_heads, mmproj_beside
from helexa.neuron.weights.model_file import WHOLE, Part
from helexa.neuron.weights.quantized_checkpoints import StoredTensor, stored_tensors
from helexa.neuron.weights.quantized_matrix import Weight
from helexa.neuron.weights.safetensors_checkpoint import StoredTensors
from helexa.neuron.weights.safetensors_shards import file_tensors
from helexa.neuron.weights.vision_config import VisionConfig, read_vision_config

_QWEN = re.compile(r"(?:model\.)?visual\.(?P<rest>.+)")
_SIGLIP = re.compile(
    r"(?:model\.)?(?:vision_tower\.(?:vision_model\.)?|vision_model\.)(?P<rest>(?!head\.).+)"
    r"|(?:model\.)?(?P<projector>(?:multi_modal_projector|connector|embed_vision|vision_adapter|vision_projection)\..+)"
)
_PATCHES = "patch_embed.proj.weight"
_SHIFTED_NORM = "multi_modal_projector.mm_soft_emb_norm.weight"


class VisionCheckpoint(StoredTensors):
    """The `Checkpoint` of a model's vision part.

    Tensors have the names of Hugging Face without the prefix of the vision part: `blocks.0.attn.qkv.weight`. The names
    of projectors begin with prefixes such as `multi_modal_projector.` or `connector.`.
    """

    def __init__(self, settings: VisionConfig, named: Mapping[str, StoredTensor], files: ExitStack) -> None:
        self.config: dict[str, Any] = settings.config  # see `VisionConfig.config`
        self.preprocessor = settings.preprocessor  # see `VisionConfig.preprocessor`
        self._files = files
        super().__init__(named, lambda name: f"the vision part of the model has no tensor {name}")

    def stored_name(self, name: str) -> str:
        """Return `name` unchanged: errors and reports omit the prefix of names in files."""
        return name

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def open_vision_checkpoint(model: Path, mmproj: Path | None = None) -> VisionCheckpoint | None:
    """Open the vision part of a model, which the caller must close, or return None.

    For the arguments, errors and the result None, see `read_vision_config`.
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
    found = file_tensors(folder)
    matches = {name: match for name in found if (match := pattern.fullmatch(name))}
    named = {match.groupdict().get("projector") or match["rest"]: found[name] for name, match in matches.items()}
    if len(named) != len(matches):
        raise ModelFileError(
            f"{folder.name}: two tensors of the vision part have the same name", advice="download the model again"
        )
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
            raise ModelFileError(
                f"{file.path.name}: unsupported tensor type {tensor.type.name} in {gguf_name}",
                advice="use an mmproj file with F16 weights",
            )
        # llama.cpp's converter adds 1 to the weight of this norm.
        shift = -1.0 if name == _SHIFTED_NORM else 0.0
        stored[name] = _GgufStored(file, tensor, shift, interleaved_heads(file, gguf_name))
    second = stored.pop(f"{_PATCHES}.1", None)
    if second is not None:
        stored[_PATCHES] = _TimeSteps((stored[_PATCHES], second))
    return VisionCheckpoint(settings, stored, files)


@dataclass(frozen=True)
class _GgufStored:
    """A tensor of an `mmproj` file; implements `StoredTensor`."""

    file: GgufFile
    tensor: GgufTensor
    shift: float  # number to add to the values. 0 to keep the stored values.
    heads: int  # number of heads whose rows are interleaved in pairs; 0 to keep the order of the rows

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
        if self.heads:
            order = tensors.from_numpy(halves(self.tensor.name, self.shape[0], self.heads))
            weight = weight[order] if isinstance(weight, Tensor) else weight.rows(order)
        return weight.float() + self.shift if self.shift and isinstance(weight, Tensor) else weight

    def on_meta(self, shape: tuple[int, ...]) -> Weight:
        elements, nbytes = BLOCK_SIZES[self.tensor.type]
        if shape[-1] % elements:
            raise ModelFileError(
                f"{self.file.path.name}: {shape[-1]} columns of {self.tensor.name} do not divide into blocks of "
                f"{elements}"
            )
        row = decode(self.tensor.type, np.zeros(shape[-1] // elements * nbytes, np.uint8), (1, shape[-1]))
        return (
            tensors.empty(shape, dtype=row.dtype, device="meta") if isinstance(row, Tensor) else row.on_meta(shape[0])
        )


@dataclass(frozen=True)
class _TimeSteps:
    """A patch embedding whose time steps are separate tensors; a `StoredTensor`."""

    steps: tuple[StoredTensor, StoredTensor]  # the tensor of each time step, [N, channels, rows, columns]

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
        return tensors.stack([_plain(step.read(index, part)) for step in self.steps], dim=2)

    def on_meta(self, shape: tuple[int, ...]) -> Weight:
        return tensors.empty(shape, device="meta")


def _plain(weight: Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()
