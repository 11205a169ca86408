"""A model with quantized weights compared with plain torch and the same weights dequantized."""

from pathlib import Path

import torch

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from tiny_models import decode, tiny_model

SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 22,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2]]


def test_logits_of_a_quantized_model_match_plain_torch(tmp_path: Path) -> None:
    tiny_model(tmp_path, **SHAPE)
    (actual, expected) = (
        decode(
            load_once(tmp_path, EngineOptions(dtype="float16", quant="q8_0", kernels=kernels, kv_cache_mb=1)),
            PROMPTS,
            2,
        )
        for kernels in ("triton", "torch")
    )
    for (tokens, logits), (other_tokens, other_logits) in zip(actual, expected, strict=True):
        assert tokens == other_tokens
        torch.testing.assert_close(logits, other_logits, rtol=0, atol=2e-2)
