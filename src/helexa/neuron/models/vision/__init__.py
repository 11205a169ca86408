"""The supported vision towers."""

from importlib import import_module
from typing import TYPE_CHECKING

from helexa.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from helexa.neuron.models.vision.tower import VisionTower

_CLASSES = {
    "gemma3": ("siglip", "Gemma3Tower"),
    "gemma4": ("gemma4", "Gemma4Tower"),
    "idefics3": ("siglip", "Idefics3Tower"),
    "llava": ("pixtral", "PixtralTower"),
    "mistral3": ("pixtral", "PixtralTower"),
    "muse_glimmer": ("muse_glimmer", "MuseGlimmerTower"),
    "qwen2_5_vl": ("qwen", "Qwen25VlTower"),
    "qwen3_5": ("qwen", "Qwen35Tower"),
    "qwen3_5_moe": ("qwen", "Qwen35Tower"),
    "qwen3_vl": ("qwen", "Qwen3VlTower"),
    "qwen3_vl_moe": ("qwen", "Qwen3VlTower"),
    "smolvlm": ("siglip", "Idefics3Tower"),
}


def tower_class(model_type: str) -> "type[VisionTower]":
    """Import and return the vision tower of the architecture `model_type`.

    Raises:
        UnsupportedModelError: the architecture is not implemented. The message lists the implemented architectures.
    """
    if model_type not in _CLASSES:
        raise UnsupportedModelError(
            f"unsupported vision architecture '{model_type}'; supported: {', '.join(sorted(_CLASSES))}"
        )
    module, name = _CLASSES[model_type]
    return getattr(import_module(f"helexa.neuron.models.vision.{module}"), name)
