"""Configurations of small models with random weights: every architecture, in shapes that several ranks can divide."""

from typing import Any

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
MODELS: dict[str, dict[str, Any]] = {
    "llama": UNEVEN | {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": SHAPE | {"model_type": "mistral", "sliding_window": 40},
    "qwen2": SHAPE | {"model_type": "qwen2"},
    "qwen3": UNEVEN | {"model_type": "qwen3"},
    "gemma3": SHAPE | {"model_type": "gemma3_text", "sliding_window": 40, "query_pre_attn_scalar": 32},
    "qwen3_moe": SHAPE | EXPERTS | {"model_type": "qwen3_moe", "shared_expert_intermediate_size": 0},
    "gpt_oss": SHAPE | EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 8, "sliding_window": 40},
    "qwen3_5": HYBRID | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": HYBRID | EXPERTS | {"model_type": "qwen3_5_moe_text"},
    "qwen3_next": HYBRID | EXPERTS | {"model_type": "qwen3_next"},
}
PROMPTS = [[(37 * n + 7 * i * i) % SHAPE["vocab_size"] for i in range(n)] for n in (1, 5, 64, 65, 150)]
"""Lengths around the size of a KV page."""
