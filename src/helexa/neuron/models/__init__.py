"""The supported model architectures, by `model_type` in `config.json`."""

from importlib import import_module
from typing import TYPE_CHECKING

from helexa.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from helexa.neuron.models.decoder import Decoder

_CLASSES = {
    "arcee": "llama_variants.Arcee",
    "cohere": "llama_variants.Cohere",
    "cohere2": "llama_variants.Cohere2",
    "deepseek_v2": "deepseek.DeepSeekV2",
    "deepseek_v3": "deepseek.DeepSeekV3",
    "ernie4_5": "llama_variants.Ernie45",
    "ernie4_5_moe": "llama_experts.Ernie45Moe",
    "exaone4": "olmo.Exaone4",
    "gemma": "gemma3.Gemma",
    "gemma2": "gemma3.Gemma2",
    "gemma3": "gemma3.Gemma3",
    "gemma4": "gemma4.Gemma4",
    "glm4": "llama_variants.Glm4",
    "glm4_moe": "llama_experts.Glm4Moe",
    "glm4_moe_lite": "deepseek.Glm4MoeLite",
    "gpt_oss": "gpt_oss.GptOss",
    "granite": "granite.Granite",
    "granite_swa": "granite.GraniteSwa",
    "granitemoe": "granite.GraniteMoe",
    "granitemoeshared": "granite.GraniteMoe",
    "granitemoehybrid": "granite.GraniteMoeHybrid",
    "hunyuan_v1_dense": "llama_variants.HunyuanDense",
    "lfm2": "lfm2.Lfm2",
    "lfm2_moe": "lfm2.Lfm2Moe",
    "llama": "llama.Llama",
    "minimax_m2": "llama_experts.MiniMaxM2",
    "ministral": "llama_variants.Mistral",
    "ministral3": "llama_variants.Ministral3",
    "mistral": "llama_variants.Mistral",
    "mistral3": "llama_variants.Mistral3",
    "muse_glimmer": "muse_glimmer.MuseGlimmer",
    "nemotron_h": "nemotron_h.NemotronH",
    "olmo2": "olmo.Olmo2",
    "olmo3": "olmo.Olmo3",
    "olmoe": "llama_experts.Olmoe",
    "phi3": "llama_variants.Phi3",
    "qwen2": "qwen.Qwen2",
    "qwen2_5_vl": "qwen.Qwen25Vl",
    "qwen3": "qwen.Qwen3",
    "qwen3_5": "qwen.Qwen35",
    "qwen3_5_moe": "qwen.Qwen35Moe",
    "qwen3_moe": "qwen.Qwen3Moe",
    "qwen3_next": "qwen.Qwen3Next",
    "qwen3_vl": "qwen.Qwen3Vl",
    "qwen3_vl_moe": "qwen.Qwen3VlMoe",
    "seed_oss": "llama_variants.SeedOss",
    "smollm3": "llama_variants.SmolLM3",
    "stablelm": "llama_variants.StableLm",
}


def check_model_type(model_type: str) -> None:
    """Raise UnsupportedModelError unless `model_type` is a supported architecture."""
    if model_type not in _CLASSES:
        raise UnsupportedModelError(
            f"unsupported architecture '{model_type}'; supported: {', '.join(sorted(_CLASSES))}"
        )


def model_class(model_type: str) -> "type[Decoder]":
    """Import and return the class that implements the architecture `model_type`.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
    """
    check_model_type(model_type)
    module, name = _CLASSES[model_type].split(".")
    return getattr(import_module(f"helexa.neuron.models.{module}"), name)
