"""The supported vision towers, one module per architecture."""

from importlib import import_module
from typing import TYPE_CHECKING

from helexa.core.errors import ModelFileError

if TYPE_CHECKING:
    from helexa.neuron.models.vision.tower import VisionTower

_CLASSES = {
    "gemma3": ("gemma3", "Gemma3Tower"),
    "idefics3": ("idefics3", "Idefics3Tower"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen25VlTower"),
    "qwen3_5": ("qwen3_5", "Qwen35Tower"),
    "qwen3_5_moe": ("qwen3_5", "Qwen35Tower"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VlTower"),
    "qwen3_vl_moe": ("qwen3_vl", "Qwen3VlTower"),
    "smolvlm": ("idefics3", "Idefics3Tower"),
}


def tower_class(model_type: str) -> "type[VisionTower]":
    """Import and return the class of the vision tower of the multimodal architecture `model_type`.

    Raises:
        ModelFileError: the architecture is not implemented. The message lists the implemented architectures.
    """
    if model_type not in _CLASSES:
        raise ModelFileError(
            f"unsupported vision architecture '{model_type}'; supported: {', '.join(sorted(_CLASSES))}"
        )
    module, name = _CLASSES[model_type]
    return getattr(import_module(f"helexa.neuron.models.vision.{module}"), name)
