"""Read the configuration of a model's vision part, from a safetensors folder or from an `mmproj` GGUF file.

This module does not import torch.
"""

from pathlib import Path
from typing import Any, NamedTuple

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.json_object import read_json
from helexa.neuron.weights.vision.mmproj import mmproj_beside, mmproj_config

_CONFIG = "config.json"
_PREPROCESSOR = "preprocessor_config.json"
_PROCESSOR = "processor_config.json"

_QWEN = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3 = {
    **_QWEN,
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_SIGLIP = {
    "num_channels": 3,
    "num_hidden_layers": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "image_size": 224,
}
_IDEFICS = {**_SIGLIP, "hidden_size": 1152, "intermediate_size": 3072, "num_attention_heads": 16, "patch_size": 32}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": {**_QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_vl_moe": {**_QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen2_5_vl": {
        **_QWEN,
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "gemma3": {
        **_SIGLIP,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "patch_size": 16,
    },
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
}
"""Settings of `vision_config` that `config.json` may omit, as in the configuration classes of transformers."""


class VisionConfig(NamedTuple):
    """The configuration of a model's vision part.

    Attributes:
        config: configuration with the keys of `config.json`. `model_type` is the type of the multimodal model, and
            `vision_config` has all settings of the vision tower.
        preprocessor: settings of the image processor, with the keys of `preprocessor_config.json`.
    """

    config: dict[str, Any]
    preprocessor: dict[str, Any]


def has_vision(model: Path, mmproj: Path | None = None) -> bool:
    """Return whether the model at `model` seems to have a vision part (see `read_vision_config`)."""
    if mmproj is not None:
        return True
    if model.is_dir() and any(model.glob("*.safetensors")):
        return isinstance(read_json(model / _CONFIG).get("vision_config"), dict)
    return mmproj_beside(model) is not None


def read_vision_config(model: Path, mmproj: Path | None = None) -> VisionConfig | None:
    """Return the configuration of the vision part of the model at `model`; None if the model has no vision part.

    Args:
        model: folder with safetensors files, GGUF file, or folder with one GGUF model.
        mmproj: GGUF file with the vision tower of a GGUF model. None to look for it beside the model.

    Raises:
        ModelFileError: a file is invalid, or the architecture is not supported.
    """
    if mmproj is None and model.is_dir() and any(model.glob("*.safetensors")):
        return _from_folder(model)
    file = mmproj or mmproj_beside(model)
    return None if file is None else _from_mmproj(GgufFile.open(file))


def _from_folder(folder: Path) -> VisionConfig | None:
    config = read_json(folder / _CONFIG)
    if not isinstance(config.get("vision_config"), dict) or config.get("model_type") not in _DEFAULTS:
        return None
    preprocessor: dict[str, Any] = {}
    if (folder / _PREPROCESSOR).is_file():
        preprocessor = read_json(folder / _PREPROCESSOR)
    if (folder / _PROCESSOR).is_file():
        nested = read_json(folder / _PROCESSOR).get("image_processor", {})
        if not isinstance(nested, dict):
            raise ModelFileError(f"{_PROCESSOR}: 'image_processor' is not an object")
        preprocessor |= nested
    return VisionConfig(_complete(config), preprocessor)


def _from_mmproj(file: GgufFile) -> VisionConfig:
    config, preprocessor = mmproj_config(file)
    return VisionConfig(_complete(config), preprocessor)


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` with the default values of missing settings in `vision_config`."""
    return {**config, "vision_config": _DEFAULTS[config["model_type"]] | config["vision_config"]}
