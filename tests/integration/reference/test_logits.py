"""Dense architectures compared with transformers in float32: checkpoints of random weights, written by transformers.

Sliding windows are shorter than most prompts, and not a multiple of a page or a chunk.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from tiny_models import assert_equal_to, decode, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SLIDING_QWEN = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 40,
    "layer_types": [SLIDING, FULL, SLIDING],
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, biased and untied": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True},
    "llama, as SmolLM": {
        "model_type": "llama",
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "llama 3.1 rope": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama, linear rope": {"model_type": "llama", "rope_parameters": LINEAR},
    "llama, yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama, yarn with all its settings": {
        "model_type": "llama",
        "rope_parameters": YARN
        | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.2, "mscale_all_dim": 0.7},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 40},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied, yarn": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen2, sliding": {"model_type": "qwen2"} | SLIDING_QWEN,
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3, sliding": {"model_type": "qwen3", "head_dim": 32, "layer_types": [SLIDING, FULL, SLIDING]} | SLIDING_QWEN,
    "gemma3": GEMMA3,
    "gemma3, biased and untied": GEMMA3 | {"attention_bias": True, "tie_word_embeddings": False},
}
# Settings for transformers, then changes to the written configuration; None removes a setting.
OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"model_type": "llama", "rope_parameters": LLAMA3},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": LLAMA3 | {"type": "llama3"}},
    ),
    "llama, before rope_type": (
        {"model_type": "llama", "rope_parameters": LINEAR | {"rope_theta": 500.0}},
        {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "mistral with types": (  # newer configurations say "ministral"
        {"model_type": "ministral", "head_dim": 16, "sliding_window": 40, "layer_types": [FULL, SLIDING, SLIDING]},
        {"model_type": "mistral"},
    ),
    "qwen2": (
        {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}} | SLIDING_QWEN,
        {"layer_types": None, "rope_parameters": None, "rope_theta": 500.0},
    ),
    "gemma3": (
        GEMMA3,
        {
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3, silent": (  # as in the released 4B model
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 40,
        },
        dict.fromkeys(
            (
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
                "layer_types",
                "rope_parameters",
                "query_pre_attn_scalar",
                "tie_word_embeddings",
            )
        ),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_match_transformers(variant: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **SHAPE | VARIANTS[variant])
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_equal_to(reference, load(tmp_path))


@pytest.mark.parametrize("variant", ["llama, yarn", "mistral", "qwen2, sliding", "qwen3, sliding", "gemma3"])
def test_rounded_activations_stay_close_to_transformers(variant: str, tmp_path: Path) -> None:
    """Test the kernels chosen for this machine. A wrong window, scale or factor changes logits by a tenth or more."""
    reference = tiny_model(tmp_path, **SHAPE | VARIANTS[variant] | {"head_dim": 32})
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 320, (length,), generator=generator).tolist() for length in (1, 65, 150)]
    runner = load_once(tmp_path, EngineOptions(context_length=512, kv_cache_mb=8))
    for prompt, (tokens, logits) in zip(prompts, decode(runner, prompts, max_step_tokens=48), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert ((logits - expected).norm(dim=-1) < 0.04 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("variant", OLDER)
def test_older_configurations_are_equivalent(variant: str, tmp_path: Path) -> None:
    settings, older = OLDER[variant]
    reference = tiny_model(tmp_path, **SHAPE | settings)
    rewrite(tmp_path, **older)
    assert_equal_to(reference, load(tmp_path))


def test_text_model_of_multimodal_gemma3_matches(tmp_path: Path) -> None:
    text = SHAPE | GEMMA3
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    reference = tiny_model(tmp_path, model_type="gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    assert_equal_to(reference, load(tmp_path))


@pytest.mark.parametrize(
    ("model", "setting", "name_in_error"),
    [
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "awq|quantization_config"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"layer_types": [FULL, SLIDING, FULL]}, "sliding_attention"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_parameters": {FULL: {"rope_theta": 100.0}}}, "rope_parameters"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window"),
        ("qwen2", {"layer_types": [FULL, SLIDING, FULL]}, "use_sliding_window"),
        ("qwen2", {"layer_types": [FULL, "chunked_attention", FULL]}, "chunked_attention"),
        ("qwen3", {"layer_types": [FULL]}, "layer_types"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_unsupported_setting_is_rejected_by_name(
    model: str, setting: dict[str, Any], name_in_error: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, **SHAPE, model_type=model)
    rewrite(tmp_path, **setting)
    with pytest.raises(ModelFileError, match=name_in_error):
        load(tmp_path)


def load(folder: Path) -> Runner:
    return load_once(folder, EngineOptions(dtype="float32", context_length=512, kv_cache_mb=64))


def rewrite(folder: Path, **settings: Any) -> None:
    """Change the configuration in `folder`; None removes a setting."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
