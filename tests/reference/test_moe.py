"""Mixtures of experts against transformers in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import assert_equal_to, tiny_model

from helexa.neuron.engine.messages import EngineOptions
from helexa.neuron.engine.runner import Runner

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 3,
}
QWEN3_MOE = SHAPE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, normalised": QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3_moe, some layers dense": QWEN3_MOE
    | {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **VARIANTS[variant])
    assert_equal_to(reference, Runner(tmp_path, EngineOptions(dtype="float32", kv_cache_mb=8)))
