"""Gemma 4 (text) compared with transformers in float32.

Layers have two shapes, shared keys and values, per-layer embeddings and experts beside the MLP. The sliding window is
shorter than most prompts, and not a multiple of a page or a chunk.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.weights.vision_config import has_vision
from neuron.weights.hf_to_gguf import write_model
from nightly import daily
from tiny_models import assert_equal_to, decode, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

_NEWER = {"per_layer_config", "layer_types"}
_UNUSED = ("k_proj", "v_proj", "k_norm")
FULL, SLIDING = "full_attention", "sliding_attention"
SHAPE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "max_position_embeddings": 512,
    "sliding_window": 40,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "hidden_size_per_layer_input": 16,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
    },
}
E2B = SHAPE | {"num_key_value_heads": 1, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
DENSE = SHAPE | {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
}
SMALL = E2B | {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
VARIANTS = {
    "as E2B": E2B,
    "as 31B": DENSE,
    "as 26B-A4B": DENSE | EXPERTS,
    "wide heads": DENSE | {"head_dim": 256, "global_head_dim": 512, "use_bidirectional_attention": "vision"},
    "all parts": E2B | EXPERTS | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_key_value_heads": 4},
    "plain": DENSE | {"attention_k_eq_v": False, "final_logit_softcapping": None, "attention_bias": True},
}


@pytest.mark.parametrize("variant", daily(["as E2B", "as 26B-A4B"], VARIANTS))
def test_logits_and_greedy_tokens_match_transformers(variant: str, tmp_path: Path) -> None:
    reference = model(tmp_path, **VARIANTS[variant])
    assert_equal_to(reference, load(tmp_path))


@pytest.mark.parametrize("variant", daily(["all parts"], ["all parts", "as 31B", "as E2B"]))
def test_logits_of_a_gguf_file_match_transformers(variant: str, tmp_path: Path) -> None:
    reference = model(tmp_path, **VARIANTS[variant])
    tensors = reference.state_dict()
    del tensors["lm_head.weight"]  # tied to the embedding
    assert_equal_to(reference, load(write_model(tmp_path / "model.gguf", reference.config, tensors)))


@pytest.mark.parametrize(("settings", "tolerance"), [(DENSE, 0.04), (SMALL, 0.08)], ids=["dense", "shared keys"])
def test_logits_with_rounded_activations_stay_close_to_transformers(
    settings: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    """Test the kernels chosen for this machine. Sublayers without a norm on their input have larger errors."""
    reference = model(tmp_path, **settings)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 320, (length,), generator=generator).tolist() for length in (1, 65, 150)]
    runner = load_once(tmp_path, EngineOptions(context_length=512, kv_cache_mb=8))
    for prompt, (tokens, logits) in zip(prompts, decode(runner, prompts, max_step_tokens=48), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert ((logits - expected).norm(dim=-1) < tolerance * expected.norm(dim=-1)).all()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the parts of E2B, which tests copy and change."""
    folder = tmp_path_factory.mktemp("saved")
    model(folder, **E2B)
    return folder


@pytest.mark.parametrize(
    ("setting", "name_in_error"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 2}, "layers.3.self_attn.k_proj"),
        ({"layer_types": [FULL, SLIDING] * 3, "per_layer_config": None}, "layer_types"),
        ({"per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 64}}}, "per_layer_config"),
        ({"per_layer_config": {n: {"head_dim": 64, "sliding_window": 3} for n in "135"}}, "sliding_window"),
        ({"per_layer_config": {n: {"head_dim": 96} for n in "135"}}, "layers.1.self_attn.q_proj"),
        ({"use_double_wide_mlp": False}, "mlp"),
        ({"hidden_size_per_layer_input": 0}, "embed_tokens_per_layer|per_layer"),
        ({"hidden_size_per_layer_input": 32}, "embed_tokens_per_layer"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping"),
        ({"attention_bias": True}, "attention_bias"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, "rope_parameters"),
        ({"rope_parameters": {SLIDING: {"rope_type": "dynamic", "factor": 2.0}}}, "dynamic"),
    ],
    ids=str,
)
def test_unsupported_or_contradictory_setting_is_named_in_the_error(
    saved: Path, setting: dict[str, Any], name_in_error: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    with pytest.raises(ModelFileError, match=name_in_error):
        load(folder)


def test_older_gemma4_config_without_per_layer_settings_gives_the_same_logits(tmp_path: Path) -> None:
    """Released models have `global_head_dim` instead of `per_layer_config`."""
    settings = E2B | {"layer_types": [SLIDING] * 5 + [FULL], "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    reference = model(tmp_path, **settings)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"global_head_dim": 64}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in _NEWER}))
    assert_equal_to(reference, load(tmp_path), brief=True)


def test_text_model_of_a_multimodal_checkpoint_matches_transformers(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"text_config": SMALL, "vision_config": vision | {"model_type": "gemma4_vision", "head_dim": 16}}
    reference = model(tmp_path, model_type="gemma4", **settings)
    assert has_vision(tmp_path)
    assert_equal_to(reference, load(tmp_path), brief=True)


def test_unused_key_and_value_weights_of_layers_with_shared_kv_are_ignored(tmp_path: Path) -> None:
    """Released models contain these tensors."""
    reference = model(tmp_path, **E2B)
    index = tmp_path / "model.safetensors.index.json"
    weights = json.loads(index.read_text())
    unused = {f"model.layers.{layer}.self_attn.{name}.weight": torch.ones(2, 2) for layer in (3, 5) for name in _UNUSED}
    save_file(unused, tmp_path / "unused.safetensors", {"format": "pt"})
    weights["weight_map"] |= dict.fromkeys(unused, "unused.safetensors")
    index.write_text(json.dumps(weights))
    assert_equal_to(reference, load(tmp_path), brief=True)


def model(folder: Path, **settings: Any) -> PreTrainedModel:
    """Save and return a random model. As in released models, the norms of query heads contain the scale of scores."""
    reference = tiny_model(folder, **settings)
    with torch.no_grad():
        for layer in getattr(reference.model, "language_model", reference.model).layers:
            layer.self_attn.q_norm.weight *= 2 * layer.self_attn.head_dim**-0.5
    reference.save_pretrained(folder, max_shard_size="50kB")
    return reference


def load(folder: Path) -> Runner:
    return load_once(folder, EngineOptions(dtype="float32", context_length=512, kv_cache_mb=64))
