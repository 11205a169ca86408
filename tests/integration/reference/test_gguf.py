"""Dense architectures from GGUF files compared with transformers in float32, with the same random weights."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from neuron.weights.hf_to_gguf import write_model
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


@pytest.mark.parametrize("kind", VARIANTS)
def test_logits_and_greedy_tokens_match_transformers(kind: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **SHAPE | VARIANTS[kind], model_type=kind)
    assert_equal_to(reference, load(write_model(tmp_path / "model.gguf", reference.config, state(reference))))


def test_llama_31_rope_scaling_is_read_from_a_tensor(tmp_path: Path) -> None:
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
    assert_equal_to(reference, load(path))


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors, without an output head that is tied to the embedding."""
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def load(path: Path) -> Runner:
    return load_once(path, EngineOptions(dtype="float32", kv_cache_mb=16))
