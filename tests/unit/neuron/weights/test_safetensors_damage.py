"""Damaged and hostile checkpoints: each loads or is rejected with a reason, quickly and with little memory."""

import json
import logging
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load
from helexa.neuron.weights.checkpoint import open_checkpoint
from nightly import cases, daily
from tiny_models import tiny_model

CASES = cases(60, 1000)
LARGEST_GROWTH = 256 << 20  # bytes; most of the growth is torch's memory pool
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": SHAPE
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3_text": SHAPE | {"model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 16},
    "gpt_oss": SHAPE | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": SHAPE
    | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "gemma4_text": SHAPE
    | {"model_type": "gemma4_text", "vocab_size_per_layer_input": 64, "num_hidden_layers": 4, "global_head_dim": 32}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16, "num_kv_shared_layers": 2}
    | {"hidden_size_per_layer_input": 8, "use_double_wide_mlp": True},
    "deepseek_v3": SHAPE
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"n_group": 2, "topk_group": 1, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 16}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 2},
    "glm4_moe": SHAPE
    | {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    | {"moe_intermediate_size": 32, "use_qk_norm": True, "first_k_dense_replace": 1},
    "lfm2_moe": SHAPE
    | {"model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "granite": SHAPE | {"model_type": "granite", "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "ministral3": SHAPE | {"model_type": "ministral3"},
    "nemotron_h": SHAPE
    | {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    | {"num_hidden_layers": 4, "mamba_num_heads": 2, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
}
MODELS |= {
    "granitemoeshared": SHAPE
    | {"model_type": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 32},
    "granite_swa": SHAPE | {"model_type": "granite_swa", "layer_rope_theta": [0, 500.0], "sliding_window": 16},
    "olmo3": SHAPE | {"model_type": "olmo3", "sliding_window": 16},
    "ernie4_5": SHAPE | {"model_type": "ernie4_5"},
    "hunyuan_v1_dense": SHAPE
    | {"model_type": "hunyuan_v1_dense"}
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}},
    "phi3": SHAPE
    | {"model_type": "phi3", "pad_token_id": None, "original_max_position_embeddings": 32}
    | {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8}},
    "exaone4": SHAPE
    | {"model_type": "exaone4", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "stablelm": SHAPE | {"model_type": "stablelm"},
    **{name: SHAPE | {"model_type": name} for name in ("arcee", "cohere", "gemma", "qwen3", "seed_oss")},
    "cohere2": SHAPE | {"model_type": "cohere2", "sliding_window": 16},
    **{name: SHAPE | {"model_type": name, "pad_token_id": None} for name in ("glm4", "olmo2", "smollm3")},
    "minimax_m2": SHAPE | {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": SHAPE | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": SHAPE
    | {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "granitemoehybrid": SHAPE
    | {"model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 2}
    | {"mamba_d_head": 32, "mamba_d_state": 16, "shared_intermediate_size": 32},
}
NEWER = ("gemma4_text", "deepseek_v3", "glm4_moe", "lfm2_moe", "granite", "ministral3", "nemotron_h")
NEWER += ("granitemoeshared", "granite_swa", "olmo3", "ernie4_5", "hunyuan_v1_dense", "phi3", "exaone4", "stablelm")
NEWER += ("arcee", "gemma", "qwen3", "seed_oss", "glm4", "olmo2", "smollm3", "minimax_m2", "ernie4_5_moe")
NEWER += ("granitemoehybrid", "olmoe", "cohere", "cohere2")
WRONG: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**16, 2**23, 2**31, 2**63, 10**40, 0.5, -0.5, 1e-300, 1e300),
    *("", "x", "fp8", "yarn", "\u0000", "full_attention", "x" * 5000, [], [1], [[[]]], ["x"] * 300, {}, {"a": {}}),
    *(float("nan"), float("inf"), {"rope_type": "llama3"}, {"quant_method": "fp8"}, {"quant_method": "mxfp4"}),
]
KEYS = ["text_config", "quantization_config", "rope_scaling", "rope_parameters", "layer_types", "tie_word_embeddings"]


def spoiled(document: Any, chance: random.Random) -> Any:
    """Replace, swap, add or delete one random value in the document and return the document."""
    at = document
    while True:
        places = list(at) if isinstance(at, dict) else list(range(len(at)))
        deeper = [place for place in places if isinstance(at[place], dict | list) and at[place]]
        if not deeper or chance.random() < 0.4:
            break
        at = at[chance.choice(deeper)]
    kind, place = chance.choice(["set", "set", "set", "add", "drop", "swap"]), chance.choice(places)
    if kind == "set":
        at[place] = deepcopy(chance.choice(WRONG))
    elif kind == "add" and isinstance(at, dict):
        at[chance.choice(KEYS)] = deepcopy(chance.choice(WRONG))
    elif kind == "drop":
        del at[place]
    else:
        other = chance.choice(places)
        at[place], at[other] = at[other], at[place]
    return document


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return `content` with up to four changed bytes; 10% of results are also truncated."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 4])):
        changed[chance.randrange(len(changed))] = chance.choice([chance.randrange(256), *b'0159-.eE"{}[],:'])
    return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.1 else changed)


def spoil_json(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.3:
        path.write_bytes(damaged(path.read_bytes(), chance))
        return
    document = json.loads(path.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 3])):
        document = spoiled(document, chance)
    path.write_text(json.dumps(document))


def spoil_header(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    if chance.random() < 0.3:
        path.write_bytes(damaged(content[: 8 + length], chance) + content[8 + length :])
        return
    header = json.dumps(spoiled(json.loads(content[8 : 8 + length]), chance)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def spoil(folder: Path, chance: random.Random) -> None:
    """Damage one file of a checkpoint."""
    files = sorted(folder.iterdir())
    weights = [file for file in files if file.suffix == ".safetensors"]
    kind = chance.choice(["config", "config", "config", "index", "header", "header", "cut", "gone"])
    if kind in ("config", "index"):
        spoil_json(folder / ("config.json" if kind == "config" else "model.safetensors.index.json"), chance)
    elif kind == "header":
        spoil_header(chance.choice(weights), chance)
    elif kind == "cut":
        file = chance.choice(files)
        file.write_bytes(file.read_bytes()[: chance.randrange(file.stat().st_size)])
    else:
        chance.choice(files).unlink()


def rejection(attempt: Callable[[], object]) -> str | None:
    """Return the message of the `ModelFileError` that `attempt` raises, or None if it succeeds."""
    try:
        attempt()
    except ModelFileError as error:
        assert str(error).isprintable()
        assert len(str(error)) <= 1000
        return str(error)
    return None


@pytest.mark.parametrize("model", daily(MODELS.keys() - NEWER, MODELS))
def test_damaged_safetensors_checkpoints_load_or_are_rejected_without_a_crash(model: str, tmp_path: Path) -> None:
    original = tmp_path / "original"
    tiny_model(original, **MODELS[model])
    stored = {file.name: file.read_bytes() for file in original.iterdir()}
    options = EngineOptions(dtype="float32", kv_cache_mb=1, snapshot_mb=1, max_sequences=2, quant="q8_0")
    chance, rejected, process = random.Random(11), 0, psutil.Process()
    load(original, options)
    memory_before = process.memory_info().rss
    logging.disable()
    for case in range(CASES):
        folder = tmp_path / str(case)
        folder.mkdir()
        for name, content in stored.items():
            (folder / name).write_bytes(content)
        spoil(folder, chance)
        rejected += rejection(lambda: load(folder, options)) is not None  # noqa: B023
        assert process.memory_info().rss - memory_before < LARGEST_GROWTH
    logging.disable(logging.NOTSET)
    assert CASES // 3 < rejected < CASES


def test_damaged_checkpoint_is_not_read_beyond_its_files(tmp_path: Path) -> None:
    tiny_model(tmp_path, **MODELS["gemma3_text"])
    chance, path = random.Random(3), next(iter(sorted(tmp_path.glob("*.safetensors"))))
    original = path.read_bytes()
    for _ in range(300):
        path.write_bytes(original)
        spoil_header(path, chance)
        try:
            with open_checkpoint(tmp_path) as checkpoint:
                for name in checkpoint.names():
                    tensor = checkpoint.read(name)
                    assert isinstance(tensor, torch.Tensor)
                    assert tuple(tensor.shape) == checkpoint.shape(name)
                    assert tensor.nbytes <= len(original) + (1 << 20)
        except ModelFileError:
            pass
