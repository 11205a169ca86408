"""The supported model architectures. Most have a module with the name of their `model_type` in `config.json`."""

from importlib import import_module
from typing import TYPE_CHECKING

from helexa.core.errors import ModelFileError

if TYPE_CHECKING:
    from helexa.neuron.models.decoder import Decoder

_CLASSES = {
    "gemma3": "gemma3.Gemma3",
    "gpt_oss": "gpt_oss.GptOss",
    "llama": "llama.Llama",
    "mistral": "mistral.Mistral",
    "qwen2": "qwen2.Qwen2",
    "qwen2_5_vl": "qwen_vl.Qwen25Vl",
    "qwen3": "qwen3.Qwen3",
    "qwen3_5": "qwen3_5.Qwen35",
    "qwen3_5_moe": "qwen3_5_moe.Qwen35Moe",
    "qwen3_moe": "qwen3_moe.Qwen3Moe",
    "qwen3_next": "qwen3_next.Qwen3Next",
    "qwen3_vl": "qwen_vl.Qwen3Vl",
    "qwen3_vl_moe": "qwen_vl.Qwen3VlMoe",
}


def check_model_type(model_type: str) -> None:
    """Raise an error if the architecture `model_type` is not implemented.

    Raises:
        ModelFileError: the architecture is not implemented. The message lists the implemented architectures.
    """
    if model_type not in _CLASSES:
        raise ModelFileError(f"unsupported architecture '{model_type}'; supported: {', '.join(sorted(_CLASSES))}")


def model_class(model_type: str) -> "type[Decoder]":
    """Import and return the class that implements the architecture `model_type`.

    Raises:
        ModelFileError: the architecture is not implemented.
    """
    check_model_type(model_type)
    module, name = _CLASSES[model_type].split(".")
    return getattr(import_module(f"helexa.neuron.models.{module}"), name)
