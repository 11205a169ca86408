"""Dense architectures from GGUF files compared with transformers in float32, with the same random weights."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from neuron.weights.hf_to_gguf import write_model
from nightly import daily
from tiny_models import assert_equal_to, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "attention_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "granite": {
        "head_dim": 16,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 7.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.22,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "seed_oss": {},
    "arcee": {},
    "smollm3": {"head_dim": 16, "pad_token_id": None, "num_hidden_layers": 5},
    "gemma": {},
    "glm4": {
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gemma2": {"attn_implementation": "eager", "query_pre_attn_scalar": 32, "sliding_window": 40},
    "gemma3_text": {
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 32,
        "sliding_window": 40,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        },
    },
}

VARIANTS |= {
    "granitemoe": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "attention_multiplier": 0.2},
    "granite_swa": {
        "head_dim": 16,
        "layer_rope_theta": [0, 10000.0, 10000.0],
        "sliding_window": 40,
        "attention_multiplier": 0.2,
    },
    "olmo2": {"head_dim": 16, "pad_token_id": None},
    "olmo3": {"head_dim": 16, "pad_token_id": None, "sliding_window": 40, "num_hidden_layers": 4},
    "exaone4": {"sliding_window": 40, "num_hidden_layers": 4},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "phi3": {
        "head_dim": 16,
        "pad_token_id": None,
        "sliding_window": 40,
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * number for number in range(6)],
            "long_factor": [2.0 + number for number in range(6)],
            "original_max_position_embeddings": 512,
            "partial_rotary_factor": 0.75,
        },
    },
    "stablelm": {"head_dim": 16, "use_qkv_bias": True},
    "cohere": {"head_dim": 16, "logit_scale": 0.25},
    "cohere2": {"head_dim": 16, "logit_scale": 0.25, "num_hidden_layers": 5, "sliding_window": 40},
}
LIKE_OTHERS = {"arcee", "ministral3", "granite_swa", "olmo2", "olmo3", "exaone4", "hunyuan_v1_dense", "stablelm"}
LIKE_OTHERS |= {"cohere", "cohere2", "gemma", "gemma2", "olmoe"}
"""Variants whose tensors are stored as those of another variant, and whose header is compared in a unit test."""

EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "topk_group": 2,
}
VARIANTS["glm4_moe"] = EXPERTS | {"use_qk_norm": True, "attention_bias": True}
VARIANTS["ernie4_5_moe"] = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}
VARIANTS["minimax_m2"] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
# llama.cpp needs as many KV heads as heads, as in the released model.
VARIANTS["olmoe"] = {"head_dim": 16, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3}
VARIANTS["deepseek_v3"] = EXPERTS | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


@pytest.mark.parametrize("kind", daily(VARIANTS.keys() - LIKE_OTHERS, VARIANTS))
def test_logits_and_greedy_tokens_match_transformers(kind: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **SHAPE | VARIANTS[kind], model_type=kind)
    assert_equal_to(
        reference, load(write_model(tmp_path / "model.gguf", reference.config, state(reference))), brief=True
    )


@pytest.mark.nightly
def test_muse_glimmer_gguf_with_scaled_query_norm_weights_matches_transformers(tmp_path: Path) -> None:
    text = SHAPE | {"model_type": "muse_glimmer_text", "num_hidden_layers": 5, "sliding_window": 40, "head_dim": 32}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"text_config": text | {"post_norm_eps": 1e-8}, "vision_config": vision}
    settings |= {"out_hidden_size": 128, "projector_hidden_size": 32}
    reference = tiny_model(tmp_path, auto=AutoModelForImageTextToText, model_type="muse_glimmer", **settings)
    stored = reference.state_dict()
    tensors = {name.replace("model.language_model", "model"): tensor for name, tensor in stored.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if "vision" not in name}
    config = reference.config.text_config
    for layer in range(config.num_hidden_layers):
        tensors[f"model.layers.{layer}.self_attn.q_norm.weight"] = torch.full((32,), config.qk_scale_factor)
        tensors[f"model.layers.{layer}.self_attn.k_norm.weight"] = torch.ones(32)
    assert_equal_to(reference, load(write_model(tmp_path / "model.gguf", config, tensors)), brief=True)


def test_older_deepseek_gguf_with_one_key_value_tensor_matches_transformers(tmp_path: Path) -> None:
    """Older files have keys without the suffix `_mla`, and one tensor for the key and value projections."""
    reference = tiny_model(tmp_path, **SHAPE | VARIANTS["deepseek_v3"], model_type="deepseek_v3")
    tensors = state(reference)

    def older(writer: gguf.GGUFWriter) -> None:
        for kind, width in (("key", 80), ("value", 32)):
            del writer.kv_data[0][f"deepseek2.attention.{kind}_length_mla"]
            writer.add_uint32(f"deepseek2.attention.{kind}_length", width)
        for index in range(SHAPE["num_hidden_layers"]):
            both = tensors.pop(f"model.layers.{index}.self_attn.kv_b_proj.weight")
            writer.add_tensor(f"blk.{index}.attn_kv_b.weight", both.numpy())

    assert_equal_to(reference, load(write_model(tmp_path / "model.gguf", reference.config, tensors, older)), brief=True)


def test_rope_scaling_of_llama_3_1_is_read_from_a_gguf_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    reference = tiny_model(tmp_path, **SHAPE, model_type="llama", rope_parameters=rope)
    scaled = reference.model.rotary_emb.inv_freq
    factors = 10000.0 ** -(torch.arange(0, 32, 2) / 32) / scaled
    assert factors.unique().numel() > 2

    def add_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())

    path = write_model(tmp_path / "model.gguf", reference.config, state(reference), add_factors)
    assert_equal_to(reference, load(path), brief=True)


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors, without an output head that is tied to the embedding."""
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def load(path: Path) -> Runner:
    return load_once(path, EngineOptions(dtype="float32", context_length=512, kv_cache_mb=16))
