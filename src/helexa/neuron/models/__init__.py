"""The supported model architectures, one module per `model_type` of a Hugging Face `config.json`."""

from importlib import import_module
from typing import TYPE_CHECKING

from helexa.core.errors import ModelFileError

if TYPE_CHECKING:
    from helexa.neuron.models.decoder import Decoder

_CLASSES = {
    "gemma3": "Gemma3",
    "gpt_oss": "GptOss",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen35",
    "qwen3_5_moe": "Qwen35Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
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
    return getattr(import_module(f"helexa.neuron.models.{model_type}"), _CLASSES[model_type])
