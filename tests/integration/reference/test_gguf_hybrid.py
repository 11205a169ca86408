"""Hybrids and mixtures of experts from GGUF files compared with transformers in float32, with the same weights."""

from pathlib import Path
from typing import Any

import pytest

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from neuron.weights.hf_to_gguf import write_model
from reference.test_gguf import state
from tiny_models import assert_equal_to, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "qwen3_next": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "granitemoehybrid": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "moe_latent_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40, "rope_parameters": YARN},
}


@pytest.mark.parametrize("kind", VARIANTS)
def test_logits_and_greedy_tokens_match_transformers(kind: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **SHAPE | VARIANTS[kind], model_type=kind)
    path = write_model(tmp_path / "model.gguf", reference.config, state(reference))
    assert_equal_to(reference, load_once(path, EngineOptions(dtype="float32", kv_cache_mb=16)), brief=True)
