"""Tiny models of every architecture, loaded on one or several ranks or hosts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, HostGroup
from helexa.neuron.engine.loading.load import load_once
from tiny_models import decode

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
