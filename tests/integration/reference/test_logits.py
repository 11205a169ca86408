"""Dense architectures compared with transformers in float32: checkpoints of random weights, written by transformers.

Sliding windows are shorter than most prompts, and not a multiple of a page or a chunk.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from nightly import daily
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
GEMMA2 = {
    "model_type": "gemma2",
    "attn_implementation": "eager",  # others ignore the soft cap
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 40,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 3.0,
}
MINISTRAL3 = {
    "model_type": "ministral3",
    "head_dim": 32,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
}
MUSE_GLIMMER = {
    "model_type": "muse_glimmer_text",
    "head_dim": 32,
    "num_hidden_layers": 5,
    "sliding_window": 40,
    "final_logit_softcapping": 3.0,
    "output_multiplier": 0.7,
    "qk_scale_factor": 1.5,
    "post_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
PROJECTOR = {"out_hidden_size": 128, "projector_hidden_size": 32}  # the defaults of Muse Glimmer are large
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 7.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.22,
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
    "ministral3": MINISTRAL3,
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied, yarn": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen2, sliding": {"model_type": "qwen2"} | SLIDING_QWEN,
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3, sliding": {"model_type": "qwen3", "head_dim": 32, "layer_types": [SLIDING, FULL, SLIDING]} | SLIDING_QWEN,
    "granite": {"model_type": "granite"} | MULTIPLIERS,
    "granite, biased and tied": {
        "model_type": "granite",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    }
    | MULTIPLIERS,
    "seed_oss": {"model_type": "seed_oss", "head_dim": 32},
    "arcee": {
        "model_type": "arcee",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": YARN | {"mscale": 1.0},
    },
    "smollm3": {"model_type": "smollm3", "pad_token_id": None, "num_hidden_layers": 5},
    "smollm3, listed and sliding": {
        "model_type": "smollm3",
        "pad_token_id": None,
        "no_rope_layers": [0, 1, 0],
        "layer_types": [SLIDING, FULL, SLIDING],
        "use_sliding_window": True,
        "sliding_window": 40,
        "rope_parameters": YARN,
    },
    "gemma": {"model_type": "gemma"},
    "glm4": {
        "model_type": "glm4",
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3, biased and untied": GEMMA3 | {"attention_bias": True, "tie_word_embeddings": False},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * number for number in range(6)],
    "long_factor": [2.0 + number for number in range(6)],
    "original_max_position_embeddings": 512,
    "partial_rotary_factor": 0.75,
}
PHI3 = {
    "model_type": "phi3",
    "pad_token_id": None,
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": 512,
    "rope_parameters": LONGROPE,
}
WINDOWS = {"sliding_window": 40, "layer_types": [SLIDING, FULL, SLIDING]}
VARIANTS |= {
    "granitemoe": {"model_type": "granitemoe", "num_local_experts": 8, "num_experts_per_tok": 3} | MULTIPLIERS,
    "granitemoeshared": {"model_type": "granitemoeshared", "num_local_experts": 8, "shared_intermediate_size": 80}
    | MULTIPLIERS,
    "granite_swa": {"model_type": "granite_swa", "layer_rope_theta": [0, 500.0, 10000.0]} | WINDOWS | MULTIPLIERS,
    "olmo2": {"model_type": "olmo2", "pad_token_id": None},
    "olmo3": {
        "model_type": "olmo3",
        "pad_token_id": None,
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 500.0}, FULL: YARN},
    }
    | WINDOWS,
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 32, "use_bias": True},
    "hunyuan_v1_dense": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
    },
    "phi3, windowed": {"model_type": "phi3", "pad_token_id": None, "sliding_window": 40},
    "phi3, longrope": PHI3,
    "exaone4": {"model_type": "exaone4"} | WINDOWS,
    "exaone4, no window": {"model_type": "exaone4", "sliding_window": None, "layer_types": [FULL] * 3},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "num_attention_heads": 2},
    "cohere": {"model_type": "cohere", "attention_bias": True, "logit_scale": 0.7},
    "cohere2": {"model_type": "cohere2", "num_attention_heads": 2, "logit_scale": 0.7} | WINDOWS,
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
    "mistral, text of Pixtral": (  # its configuration omits the number of heads
        {
            "model_type": "mistral",
            "hidden_size": 256,
            "num_attention_heads": 32,
            "head_dim": 16,
            "sliding_window": None,
        },
        {"num_attention_heads": None},
    ),
    "mistral with types": (  # newer configurations say "ministral"
        {"model_type": "ministral", "head_dim": 16, "sliding_window": 40, "layer_types": [FULL, SLIDING, SLIDING]},
        {"model_type": "mistral"},
    ),
    "qwen2": (
        {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}} | SLIDING_QWEN,
        {"layer_types": None, "rope_parameters": None, "rope_theta": 500.0},
    ),
    "smollm3": (
        {
            "model_type": "smollm3",
            "pad_token_id": None,
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 40,
        },
        {"layer_types": None, "no_rope_layers": None, "rope_parameters": None},
    ),
    "olmo3": (
        {
            "model_type": "olmo3",
            "pad_token_id": None,
            "num_hidden_layers": 5,
            "sliding_window": 40,
            "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 10000.0}, FULL: YARN},
        },
        {"layer_types": None, "rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": YARN},
    ),
    "granite_swa": (
        {"model_type": "granite_swa", "num_hidden_layers": 5, "sliding_window": 40},
        {"layer_types": None, "layer_rope_theta": None},
    ),
    "exaone4": (
        {"model_type": "exaone4", "sliding_window": 40, "layer_types": [SLIDING, SLIDING, FULL]},
        {"layer_types": None, "sliding_window_pattern": "LLG"},
    ),
    "cohere, silent": (
        {"model_type": "cohere"},
        dict.fromkeys(("layer_norm_eps", "logit_scale", "rope_parameters", "tie_word_embeddings")),
    ),
    "cohere2": (
        {"model_type": "cohere2", "num_hidden_layers": 5, "sliding_window": 40},
        dict.fromkeys(("layer_types", "rope_parameters")),
    ),
    "phi3, named su": (
        PHI3,
        {
            "rope_parameters": None,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "su", **{key: LONGROPE[key] for key in ("short_factor", "long_factor")}},
        },
    ),
    "gemma, as released": ({"model_type": "gemma"}, {"hidden_act": "gelu", "rope_parameters": None}),
    "gemma2": (GEMMA2 | {"num_hidden_layers": 4}, {"layer_types": None, "rope_parameters": None}),
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
    "lfm2": (
        {
            "model_type": "lfm2",
            "block_multiple_of": 48,
            "layer_types": ["conv", FULL, "conv"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        {
            **dict.fromkeys(("layer_types", "rope_parameters", "intermediate_size", "tie_word_embeddings")),
            **{"block_ff_dim": 96, "full_attn_idxs": [1], "rope_theta": 500.0, "tie_embedding": True},
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


LIKE_OTHERS = {"cohere", "gemma", "granite_swa", "granitemoe", "exaone4, no window", "olmo2", "phi3, windowed"}
"""Variants whose differences from Llama are also those of other variants."""
ROUNDED = [
    *("llama, yarn", "granite", "mistral", "ministral3", "qwen2, sliding", "qwen3, sliding", "seed_oss", "smollm3"),
    *("gemma2", "gemma3", "granite_swa", "olmo2", "olmo3", "ernie4_5", "hunyuan_v1_dense", "phi3, windowed"),
    *("exaone4", "stablelm", "arcee", "gemma", "glm4", "cohere", "cohere2"),
]
ROUNDED_DAILY = [*ROUNDED[:10], "olmo3", "hunyuan_v1_dense"]


@pytest.mark.parametrize("variant", daily(VARIANTS.keys() - LIKE_OTHERS, VARIANTS))
def test_logits_and_greedy_tokens_match_transformers(variant: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **SHAPE | VARIANTS[variant])
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_equal_to(reference, load(tmp_path))


@pytest.mark.parametrize("variant", daily(ROUNDED_DAILY, ROUNDED))
def test_logits_with_rounded_activations_stay_close_to_transformers(variant: str, tmp_path: Path) -> None:
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
def test_older_config_json_keys_give_the_same_logits_as_current_keys(variant: str, tmp_path: Path) -> None:
    settings, older = OLDER[variant]
    reference = tiny_model(tmp_path, **SHAPE | settings)
    rewrite(tmp_path, **older)
    assert_equal_to(reference, load(tmp_path), brief=True)


@pytest.mark.parametrize(
    ("model_type", "text", "vision"),
    [
        ("gemma3", GEMMA3, {"model_type": "siglip_vision_model", "image_size": 28}),
        ("mistral3", MINISTRAL3, {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}),
        ("muse_glimmer", MUSE_GLIMMER, {"model_type": "muse_glimmer_vision"}),
    ],
    ids=["gemma3", "mistral3", "muse_glimmer"],
)
def test_text_model_of_a_multimodal_model_matches_transformers(
    model_type: str, text: dict[str, Any], vision: dict[str, Any], tmp_path: Path
) -> None:
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    auto = AutoModelForCausalLM if model_type == "gemma3" else AutoModelForImageTextToText
    settings: dict[str, Any] = {"text_config": SHAPE | text, "vision_config": tiny | vision} | PROJECTOR
    reference = tiny_model(tmp_path, auto=auto, model_type=model_type, **settings)
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
        ("ministral3", {"rope_parameters": YARN}, "llama_4_scaling_beta"),
        ("ministral3", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2", {"layer_types": [FULL, SLIDING, FULL]}, "use_sliding_window"),
        ("qwen2", {"layer_types": [FULL, "chunked_attention", FULL]}, "chunked_attention"),
        ("qwen3", {"layer_types": [FULL]}, "layer_types"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers"),
        ("smollm3", {"layer_types": [FULL, SLIDING, FULL]}, "use_sliding_window"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "full_attention"),
        ("lfm2", {"layer_types": ["conv", FULL, FULL], "conv_L_cache": 65}, "65 tokens"),
        ("lfm2", {"layer_types": ["conv", FULL, FULL], "conv_L_cache": 1}, "over 1 tokens"),
        ("lfm2", {"block_multiple_of": 0}, "configuration is invalid"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc"),
        ("olmo3", {"rope_parameters": YARN}, "rope_parameters"),
        ("granite_swa", {"layer_rope_theta": [0.0]}, "layer_rope_theta"),
        ("granite_swa", {"layer_rope_theta": [0, 500.0, None]}, "'layer_rope_theta' is .* 0 or a positive number"),
        ("granite_swa", {"layer_rope_theta": [0, 500.0, -1.0]}, "'layer_rope_theta' is .* 0 or a positive number"),
        ("granitemoe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("ernie4_5", {"use_bias": True}, "use_bias"),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, "short_factor"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LX"}, "sliding_window_pattern"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual"),
        ("glm4", {"hidden_act": "gelu"}, "hidden_act"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere", {"logit_scale": 0}, "logit_scale"),
        ("cohere2", {"sliding_window": 0}, "sliding_window"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_unsupported_setting_is_named_in_the_error(
    model: str, setting: dict[str, Any], name_in_error: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, **SHAPE, model_type=model, pad_token_id=0)
    rewrite(tmp_path, **setting)
    with pytest.raises(ModelFileError, match=name_in_error):
        load(tmp_path)


@pytest.mark.parametrize(
    ("setting", "name_in_error"),
    [
        ({"layer_rope_theta": [500.0, 0, 7.0, 500.0, 0]}, "layer_rope_theta"),
        ({"layer_rope_theta": [0]}, "layer_rope_theta"),
        ({"post_norm_eps": 0}, "post_norm_eps"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
    ],
)
def test_unsupported_setting_of_muse_glimmer_is_named_in_the_error(
    setting: dict[str, Any], name_in_error: str, tmp_path: Path
) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"text_config": SHAPE | MUSE_GLIMMER, "vision_config": vision} | PROJECTOR
    tiny_model(tmp_path, auto=AutoModelForImageTextToText, model_type="muse_glimmer", **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    rewrite(tmp_path, text_config=config["text_config"] | setting)
    with pytest.raises(ModelFileError, match=name_in_error):
        load(tmp_path)


def test_longrope_uses_long_factors_if_context_exceeds_the_original_context(tmp_path: Path) -> None:
    factors = LONGROPE["long_factor"]
    settings: dict[str, Any] = SHAPE | PHI3 | {"rope_parameters": LONGROPE | {"short_factor": factors}}
    reference = tiny_model(tmp_path, **settings)
    rewrite(tmp_path, rope_parameters=LONGROPE)
    options = EngineOptions(dtype="float32", context_length=513, kv_cache_mb=64)
    assert_equal_to(reference, load_once(tmp_path, options), brief=True)


def load(folder: Path) -> Runner:
    return load_once(folder, EngineOptions(dtype="float32", context_length=512, kv_cache_mb=64))


def rewrite(folder: Path, **settings: Any) -> None:
    """Change the configuration in `folder`; None removes a setting."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
