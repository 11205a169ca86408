"""Hybrids of Gated DeltaNet and attention compared with transformers in float32."""

import json
import re
from math import inf
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from nightly import daily
from tiny_models import assert_equal_to, decode, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
SEED = 2  # with this seed, no two logits nearly tie
LINEAR, FULL = "linear_attention", "full_attention"
LFM2 = {
    "model_type": "lfm2",
    "block_multiple_of": 48,
    "layer_types": ["conv", FULL, "conv", FULL],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LFM2_MOE = {
    "model_type": "lfm2_moe",
    "num_dense_layers": 1,
    "layer_types": ["conv", FULL, "conv", "conv"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
GRANITE_HYBRID = {
    "model_type": "granitemoehybrid",
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 7.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.22,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5, layers in another order": {
        "model_type": "qwen3_5_text",
        "layer_types": [FULL, LINEAR, FULL, LINEAR],
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"} | EXPERTS,
    "qwen3_next": {"model_type": "qwen3_next"} | EXPERTS,
    "granitemoehybrid": GRANITE_HYBRID,
    "granitemoehybrid, dense with rotation": GRANITE_HYBRID
    | {
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_n_groups": 2,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "tie_word_embeddings": True,
    },
    "lfm2": LFM2,
    "nemotron_h": NEMOTRON_H | {"moe_latent_size": 32},
    "nemotron_h, wide experts": NEMOTRON_H | {"layers_block_type": [LINEAR, "moe", FULL]},
    "nemotron_h, one group": NEMOTRON_H
    | {
        "layers_block_type": [LINEAR, "mlp", FULL, LINEAR],
        "n_groups": 1,
        "use_conv_bias": False,
        "conv_kernel": 3,
    },
    "lfm2_moe": LFM2_MOE,
    "lfm2_moe, plain weights": LFM2_MOE
    | {"norm_topk_prob": False, "use_expert_bias": False, "routed_scaling_factor": 1.5, "num_dense_layers": 0},
    "lfm2, biased and untied": LFM2
    | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    "qwen3_next, some layers dense": {
        "model_type": "qwen3_next",
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "linear_num_key_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    }
    | EXPERTS,
}


NIGHTLY = {"lfm2, biased and untied", "lfm2_moe, plain weights", "nemotron_h, one group", "nemotron_h, wide experts"}


@pytest.mark.parametrize("variant", daily(VARIANTS.keys() - NIGHTLY, VARIANTS))
def test_logits_and_greedy_tokens_match_transformers(variant: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, SEED, **SHAPE | VARIANTS[variant])
    assert_equal_to(reference, load_once(tmp_path, EngineOptions(dtype="float32", kv_cache_mb=8)))


@pytest.mark.parametrize(("model_type", "tied", "seed"), [("qwen3_5", True, 6), ("qwen3_5_moe", False, SEED)])
def test_text_model_of_a_multimodal_checkpoint_matches_transformers(
    model_type: str, tied: bool, seed: int, tmp_path: Path
) -> None:
    text = SHAPE | (EXPERTS if model_type == "qwen3_5_moe" else {})
    text["rope_parameters"] = {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    settings = {"model_type": model_type, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    reference = tiny_model(tmp_path, seed, auto=AutoModelForImageTextToText, **settings)
    assert_equal_to(reference, load_once(tmp_path, EngineOptions(dtype="float32", kv_cache_mb=8)), brief=True)


ROUNDED = ("lfm2_moe", "nemotron_h", "granitemoehybrid")


@pytest.mark.parametrize("variant", daily({"nemotron_h"}, ROUNDED))
def test_native_logits_stay_close_to_transformers(variant: str, tmp_path: Path) -> None:
    """The native kernels round activations. A missing gate, norm or bias changes most logits by a tenth or more.

    In a few rows, a router chooses another expert because of rounding.
    """
    reference = tiny_model(tmp_path, SEED, **SHAPE | VARIANTS[variant] | {"head_dim": 32, "linear_value_head_dim": 32})
    prompts = [[(37 * n + 7 * i * i) % 320 for i in range(n)] for n in (1, 65, 150)]
    runner = load_once(tmp_path, EngineOptions(context_length=512, kv_cache_mb=8))
    assert runner.ops.name == "native"
    for prompt, (tokens, logits) in zip(prompts, decode(runner, prompts, max_step_tokens=48), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.03


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron")
    tiny_model(folder, SEED, **SHAPE | NEMOTRON_H)
    return folder


def rewritten(model: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """Copy a model to `folder` with a changed configuration; None removes a setting."""
    copytree(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def test_released_nemotron_config_gives_the_logits_of_the_transformers_config(nemotron: Path, tmp_path: Path) -> None:
    """Released models write the layer types as a string of one character per layer, beside the number of layers."""
    older = {"layers_block_type": None, "hybrid_override_pattern": "ME*-ME", "num_hidden_layers": 6}
    options, prompt = EngineOptions(dtype="float32", kv_cache_mb=8), list(range(40))
    expected = load_once(nemotron, options)
    runner = load_once(rewritten(nemotron, tmp_path / "older", older | {"time_step_limit": [0.0, inf]}), options)
    (tokens, logits), (expected_tokens, expected_logits) = (
        decode(one, [prompt], steps=2)[0] for one in (runner, expected)
    )
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"layers_block_type": None}, "layers_block_type"),
        ({"layers_block_type": [LINEAR, "moe", "mlp", "mlp", LINEAR, "moe"]}, "'layers_block_type' has attention"),
        ({"layers_block_type": [LINEAR, "moe", FULL, "rnn", LINEAR, "moe"]}, "'rnn'"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M?*-ME"}, "configuration is invalid"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"moe_latent_size": 16}, "fc1_latent_proj"),
        ({"moe_latent_size": -1}, "moe_latent_size"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"n_groups": 3}, "4 Mamba-2 heads cannot share 3 groups"),
        ({"ssm_state_size": 1 << 22}, "needs a recurrent state of"),
    ],
)
def test_unsupported_nemotron_setting_is_named_in_the_error(
    nemotron: Path, settings: dict[str, Any], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=re.escape(error)):
        load_once(rewritten(nemotron, tmp_path / "model", settings), EngineOptions(dtype="float32", kv_cache_mb=8))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"layer_types": ["mamba"] * 4}, "'layer_types' has attention"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"time_step_limit": [0.01, 0.1]}, "time_step_limit"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias"),
        ({"mamba_n_heads": 0, "mamba_d_head": "auto"}, "configuration is invalid"),
    ],
)
def test_unsupported_granite_setting_is_named_in_the_error(
    settings: dict[str, Any], error: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path / "granite", SEED, **SHAPE | GRANITE_HYBRID)
    with pytest.raises(ModelFileError, match=error):
        load_once(rewritten(tmp_path / "granite", tmp_path / "model", settings), EngineOptions(dtype="float32"))


def test_released_granite_config_gives_the_logits_of_the_transformers_config(tmp_path: Path) -> None:
    """Released models name the layer types "mamba" and "attention", and the width of a head may be "auto"."""
    reference = tiny_model(tmp_path / "granite", SEED, **SHAPE | GRANITE_HYBRID)
    older = {"layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_d_head": "auto"}
    model = rewritten(tmp_path / "granite", tmp_path / "model", older | {"position_embedding_type": "nope"})
    assert_equal_to(reference, load_once(model, EngineOptions(dtype="float32", kv_cache_mb=8)), brief=True)
