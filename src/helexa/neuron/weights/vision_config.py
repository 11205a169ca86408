"""Read the configuration of a model's vision part, from safetensors or `mmproj`.

This module does not import torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.mmproj import mmproj_beside, mmproj_config
from helexa.neuron.weights.model_file import read_json

_CONFIG = "config.json"
_MAX_MMPROJ_HEADER_BYTES = 8 << 20  # limit for the server, which reads the header; real headers have less than 1 MiB
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
_PIXTRAL = {
    "num_channels": 3,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_IDEFICS = {**_SIGLIP, "hidden_size": 1152, "intermediate_size": 3072, "num_attention_heads": 16, "patch_size": 32}

# Settings of `vision_config` that `config.json` may omit, as in the configuration classes of transformers.
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
    "gemma4": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
    },
    "llava": _PIXTRAL,
    "mistral3": _PIXTRAL,
    "muse_glimmer": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 50,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "patch_size": 14,
        "patch_temporal": 2,
        "merge_size": 2,
        "pos_emb_height": 32,
        "pos_emb_width": 32,
        "layer_norm_eps": 1e-5,
    },
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
}


class VisionConfig(NamedTuple):
    """The configuration of a model's vision part."""

    # Configuration with the keys of `config.json`. `model_type` is the type of the multimodal model, and
    # `vision_config` has all settings of the vision tower.
    config: dict[str, Any]
    preprocessor: dict[str, Any]  # settings of the image processor, with the keys of `preprocessor_config.json`


def has_vision(model: Path, mmproj: Path | None = None) -> bool:
    """Return whether the model seems to have a vision part.

    The vision part is not validated. With `mmproj`, the result is True. For the arguments, see `read_vision_config`.
    """
    if mmproj is not None:
        return True
    if model.is_dir() and any(model.glob("*.safetensors")):
        return _has_known_vision(read_json(model / _CONFIG))
    return mmproj_beside(model) is not None


def _has_known_vision(config: Mapping[str, Any]) -> bool:
    vision, model_type = config.get("vision_config"), config.get("model_type")
    if not isinstance(vision, dict) or model_type not in _DEFAULTS:
        return False
    # Models of the type `llava` with other towers than Pixtral have CLIP towers, which are not supported.
    return model_type != "llava" or vision.get("model_type") == "pixtral"


def read_vision_config(model: Path, mmproj: Path | None = None) -> VisionConfig | None:
    """Return the configuration of a model's vision part; None if there is none.

    The result is also None if safetensors files have a vision part of an unsupported architecture.

    Args:
        model: folder with safetensors files, GGUF file, or folder with one GGUF model.
        mmproj: GGUF file with the vision tower of a GGUF model. None to look for it beside the model.

    Raises:
        ModelFileError: a file is invalid, or the projector of the GGUF file is not supported.
    """
    if mmproj is None and model.is_dir() and any(model.glob("*.safetensors")):
        return _from_folder(model)
    file = mmproj or mmproj_beside(model)
    return None if file is None else _from_mmproj(GgufFile.open(file, _MAX_MMPROJ_HEADER_BYTES))


def _from_folder(folder: Path) -> VisionConfig | None:
    config = read_json(folder / _CONFIG)
    if not _has_known_vision(config):
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
    """Return a copy of `config` with defaults for settings of `vision_config`."""
    return {**config, "vision_config": _DEFAULTS[config["model_type"]] | config["vision_config"]}
