"""The supported model architectures, by `model_type` in `config.json`."""

from importlib import import_module
from typing import TYPE_CHECKING

from helexa.core.errors import ModelFileError

if TYPE_CHECKING:
    from helexa.neuron.models.decoder import Decoder

_CLASSES = {
    "arcee": "llama.Arcee",
    "deepseek_v2": "deepseek.DeepSeekV2",
    "deepseek_v3": "deepseek.DeepSeekV3",
    "ernie4_5": "llama.Ernie45",
    "ernie4_5_moe": "ernie4_5_moe.Ernie45Moe",
    "exaone4": "olmo.Exaone4",
    "gemma2": "gemma3.Gemma2",
    "gemma3": "gemma3.Gemma3",
    "gemma4": "gemma4.Gemma4",
    "glm4_moe": "glm4_moe.Glm4Moe",
    "glm4_moe_lite": "deepseek.Glm4MoeLite",
    "gpt_oss": "gpt_oss.GptOss",
    "granite": "granite.Granite",
    "granite_swa": "granite.GraniteSwa",
    "granitemoe": "granite.GraniteMoe",
    "granitemoeshared": "granite.GraniteMoe",
    "granitemoehybrid": "granite_hybrid.GraniteMoeHybrid",
    "hunyuan_v1_dense": "hunyuan.HunyuanDense",
    "lfm2": "lfm2.Lfm2",
    "lfm2_moe": "lfm2.Lfm2Moe",
    "llama": "llama.Llama",
    "minimax_m2": "minimax_m2.MiniMaxM2",
    "ministral": "llama.Mistral",
    "ministral3": "llama.Ministral3",
    "mistral": "llama.Mistral",
    "mistral3": "llama.Mistral3",
    "muse_glimmer": "muse_glimmer.MuseGlimmer",
    "nemotron_h": "nemotron_h.NemotronH",
    "olmo2": "olmo.Olmo2",
    "olmo3": "olmo.Olmo3",
    "phi3": "phi3.Phi3",
    "qwen2": "qwen.Qwen2",
    "qwen2_5_vl": "qwen.Qwen25Vl",
    "qwen3": "qwen.Qwen3",
    "qwen3_5": "qwen3_5.Qwen35",
    "qwen3_5_moe": "qwen3_5.Qwen35Moe",
    "qwen3_moe": "qwen.Qwen3Moe",
    "qwen3_next": "qwen3_5.Qwen3Next",
    "qwen3_vl": "qwen.Qwen3Vl",
    "qwen3_vl_moe": "qwen.Qwen3VlMoe",
    "seed_oss": "llama.SeedOss",
    "smollm3": "smollm3.SmolLM3",
    "stablelm": "stablelm.StableLm",
}


def check_model_type(model_type: str) -> None:
    """Raise a ModelFileError that lists the architectures unless `model_type` is one."""
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
