"""Hybrids of Gated DeltaNet and attention compared with transformers in float32."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from tiny_models import assert_equal_to, tiny_model

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


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_match_transformers(variant: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, SEED, **SHAPE | VARIANTS[variant])
    assert_equal_to(reference, load_once(tmp_path, EngineOptions(dtype="float32", kv_cache_mb=8)))


@pytest.mark.parametrize(("model_type", "tied", "seed"), [("qwen3_5", True, 6), ("qwen3_5_moe", False, SEED)])
def test_text_model_of_a_multimodal_checkpoint_matches(model_type: str, tied: bool, seed: int, tmp_path: Path) -> None:
    text = SHAPE | (EXPERTS if model_type == "qwen3_5_moe" else {})
    text["rope_parameters"] = {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    settings = {"model_type": model_type, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    reference = tiny_model(tmp_path, seed, auto=AutoModelForImageTextToText, **settings)
    assert_equal_to(reference, load_once(tmp_path, EngineOptions(dtype="float32", kv_cache_mb=8)))
