"""Tiny models of every architecture, loaded on one or several ranks or hosts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import HostGroup
from helexa.neuron.engine.loading.load import load_once
from neuron.weights.hf_to_gguf import write_model
from nightly import daily
from tiny_models import decode, tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
UNEVEN = SHAPE | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
HYBRID = SHAPE | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
LFM2 = SHAPE | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
GEMMA4 = SHAPE | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 64,
    "sliding_window": 40,
    "final_logit_softcapping": 10.0,
    "hidden_size_per_layer_input": 0,
}
NEMOTRON_H = SHAPE | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_latent_size": 48,
    "moe_shared_expert_intermediate_size": 48,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": UNEVEN | {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": SHAPE | {"model_type": "mistral", "sliding_window": 40},
    "ministral3": SHAPE
    | {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "qwen2": SHAPE | {"model_type": "qwen2"},
    "qwen3": UNEVEN | {"model_type": "qwen3"},
    "granite": UNEVEN
    | {"model_type": "granite", "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 2.0},
    "seed_oss": UNEVEN | {"model_type": "seed_oss"},
    "arcee": UNEVEN | {"model_type": "arcee"},
    "smollm3": SHAPE | {"model_type": "smollm3", "pad_token_id": None, "num_hidden_layers": 5},
    "gemma": SHAPE | {"model_type": "gemma", "num_key_value_heads": 1},
    "gemma2": SHAPE | {"model_type": "gemma2", "sliding_window": 40, "attn_logit_softcapping": 0.5},
    "gemma3": SHAPE | {"model_type": "gemma3_text", "sliding_window": 40, "query_pre_attn_scalar": 32},
    "gemma4": GEMMA4
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
    "gemma4, shared keys": GEMMA4
    | {
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 320,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "qwen3_moe": SHAPE | EXPERTS | {"model_type": "qwen3_moe", "shared_expert_intermediate_size": 0},
    "gpt_oss": SHAPE | EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 8, "sliding_window": 40},
    "lfm2": LFM2 | {"model_type": "lfm2", "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "lfm2_moe": LFM2 | EXPERTS | {"model_type": "lfm2_moe", "shared_expert_intermediate_size": 0},
    "nemotron_h": NEMOTRON_H | {"model_type": "nemotron_h"},
    "granitemoehybrid": UNEVEN
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 6,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "intermediate_size": 48,
        "shared_intermediate_size": 48,
    },
    "qwen3_5": HYBRID | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": HYBRID | EXPERTS | {"model_type": "qwen3_5_moe_text"},
    "qwen3_next": HYBRID | EXPERTS | {"model_type": "qwen3_next"},
    "minimax_m2": UNEVEN | {"model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 3},
    "deepseek_v3": SHAPE
    | {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 64,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
}
WINDOWS = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
MODELS |= {
    "granitemoe": UNEVEN | {"model_type": "granitemoe", "num_local_experts": 8, "num_experts_per_tok": 3},
    "granitemoeshared": UNEVEN
    | {
        "model_type": "granitemoeshared",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 192,
    },
    "granite_swa": UNEVEN | WINDOWS | {"model_type": "granite_swa"},
    "olmo3": UNEVEN | WINDOWS | {"model_type": "olmo3", "pad_token_id": None},
    "exaone4": UNEVEN | WINDOWS | {"model_type": "exaone4"},
    "ernie4_5": UNEVEN | {"model_type": "ernie4_5"},
    "hunyuan_v1_dense": UNEVEN | {"model_type": "hunyuan_v1_dense"},
    "phi3": UNEVEN | {"model_type": "phi3", "pad_token_id": None},
    "glm4": UNEVEN
    | {
        "model_type": "glm4",
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "stablelm": UNEVEN | {"model_type": "stablelm", "num_attention_heads": 3},
    "cohere": UNEVEN | {"model_type": "cohere"},
    "cohere2": UNEVEN | WINDOWS | {"model_type": "cohere2", "num_attention_heads": 3},
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS |= {
    "olmo2": UNEVEN | {"model_type": "olmo2", "pad_token_id": None},
    "ernie4_5_moe": UNEVEN
    | {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48},
    "olmoe": UNEVEN | {"model_type": "olmoe", "num_attention_heads": 3, "num_experts": 8, "num_experts_per_tok": 3},
    "glm4_moe": UNEVEN
    | {
        "model_type": "glm4_moe",
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "use_qk_norm": True,
    },
    "glm4_moe_lite": SHAPE | LATENT | {"model_type": "glm4_moe_lite", "q_lora_rank": 48},
    "deepseek_v2": SHAPE | LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "muse_glimmer": {
        "auto": AutoModelForImageTextToText,
        "model_type": "muse_glimmer",
        "text_config": UNEVEN | {"model_type": "muse_glimmer_text", "num_hidden_layers": 4, "sliding_window": 40},
        "vision_config": VISION,
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
}
LIKE_OTHERS = {
    "olmo2",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "muse_glimmer",
    "arcee",
    "gemma",
    "glm4",
    "gemma2",
    "ernie4_5",
    "exaone4",
    "granite_swa",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "stablelm",
    "gemma4",
    "granite",
    "lfm2_moe",
    "ministral3",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "seed_oss",
    "smollm3",
    "nemotron_h",
    "olmoe",
    "cohere",
    "cohere2",
}
"""Models whose weights are divided as in another of `MODELS`: as in llama, qwen3_5_moe, lfm2 or granitemoehybrid."""
NAMES = daily(MODELS.keys() - LIKE_OTHERS, MODELS)
"""Names of `MODELS` as test parameters."""
UNDIVIDED = {"gemma4, shared keys"}
"""Models whose layers read more than the residual stream, so that hosts cannot divide the layers."""
STEPS = 8
PROMPTS = [[(37 * n + 7 * i * i) % SHAPE["vocab_size"] for i in range(n)] for n in (1, 5, 64, 65, 150)]


@contextmanager
def loaded(model: Path, group: HostGroup | None = None, **options: Any) -> Iterator[Runner]:
    """Load a model for the duration of the `with` block."""
    runner = load_once(model, EngineOptions(kv_cache_mb=8, threads=1, **options), group=group)
    try:
        yield runner
    finally:
        runner.close()


def logits_and_tokens(model: Path, group: HostGroup | None = None, **options: Any) -> tuple[Tensor, list[list[int]]]:
    """Return the logits [rows, V] and the tokens of all prompts, prefilled in chunks and decoded in one batch."""
    with loaded(model, group, **options) as runner:
        results = decode(runner, PROMPTS, steps=STEPS, max_step_tokens=48)
    return torch.cat([logits for _, logits in results]), [tokens for tokens, _ in results]


def write_tiny_gguf(folder: Path) -> Path:
    """Write a GGUF file `tiny.gguf` with the token ids of SmolLM2, and return its path.

    Tests of processes use this model, because engines load it faster than a real model.
    """
    shape = {"vocab_size": 5000, "max_position_embeddings": 8192}
    model = tiny_model(folder / "checkpoint", seed=4, **MODELS["llama"] | shape)
    return write_model(folder / "tiny.gguf", model.config, model.state_dict())
