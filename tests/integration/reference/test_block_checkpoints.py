"""Checkpoints in fp8 and MXFP4 blocks, and plain checkpoints quantized at load, compared with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.weights.quantization_formats import QuantPolicy
from helexa.neuron.weights.quantize import quantize
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor
from tiny_models import assert_equal_to, decode, tiny_model

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
QWEN3_MOE = SHAPE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT_OSS = SHAPE | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40}


def store(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, object] | None) -> None:
    """Replace the tensors and the quantization configuration of the checkpoint in `folder`."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def in_float32(folder: Path, quant: str = "") -> Runner:
    return load_once(folder, EngineOptions(dtype="float32", kv_cache_mb=8, quant=quant))


def test_logits_of_fp8_weights_with_block_scales_match_transformers(tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **QWEN3_MOE)
    tensors: dict[str, Tensor] = {}
    for name, weight in reference.state_dict().items():
        tensors[name] = weight
        if "_proj" in name:
            scale = torch.rand(*weight.shape[:-2], -(-weight.shape[-2] // 24), -(-weight.shape[-1] // 40)) * 0.01
            wide = scale.repeat_interleave(24, -2)[..., : weight.shape[-2], :].repeat_interleave(40, -1)
            wide = wide[..., : weight.shape[-1]]
            tensors[name] = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            weight.copy_(tensors[name].float() * wide)
    store(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [24, 40]})
    assert_equal_to(reference, in_float32(tmp_path), brief=True)


@pytest.mark.parametrize(
    "settings",
    [
        SHAPE | {"model_type": "ministral3"},  # released with static scales of the activations
        SHAPE | {"model_type": "phi3", "head_dim": 16, "pad_token_id": None},  # fused projections
        SHAPE | {"model_type": "ernie4_5"},  # the rows of queries and keys are reordered
    ],
    ids=lambda settings: settings["model_type"],
)
def test_logits_of_fp8_weights_with_one_scale_per_tensor_match_transformers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    reference = tiny_model(tmp_path, **settings)
    tensors: dict[str, Tensor] = {}
    for name, weight in reference.state_dict().items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{name}_scale_inv": scale, name.replace("weight", "activation_scale"): torch.tensor(0.1)}
            weight.copy_(tensors[name].float() * scale)
    if reference.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    static = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    store(tmp_path, tensors, static)
    assert_equal_to(reference, in_float32(tmp_path), brief=True)


def test_logits_of_mxfp4_experts_match_transformers(tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **GPT_OSS)
    tensors: dict[str, Tensor] = {}
    for name, weight in reference.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    store(tmp_path, tensors, {"quant_method": "mxfp4"})
    assert_equal_to(reference, in_float32(tmp_path), brief=True)


@pytest.mark.parametrize("quant", ["q4k", "q8_0"])
def test_quantization_at_load_quantizes_the_matrices_that_the_policy_names(quant: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **QWEN3_MOE)
    policy = QuantPolicy(quant, SHAPE["num_hidden_layers"])
    changed = 0
    for name, weight in reference.state_dict().items():
        for matrix in weight if weight.dim() == 3 else [weight]:
            form = policy.format_of(name, matrix.shape[-1]) if matrix.dim() == 2 else None
            if form is not None:
                result = quantize(matrix, form)
                assert isinstance(result, GroupwiseTensor)
                matrix.copy_(result.dequantize())
                changed += 1
    assert changed > 4 * 3 * 3
    assert_equal_to(reference, in_float32(tmp_path, quant), brief=True)


def test_weights_quantized_at_load_use_less_memory(tmp_path: Path) -> None:
    tiny_model(tmp_path, **SHAPE | {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512})
    runners = {quant: load_once(tmp_path, EngineOptions(kv_cache_mb=8, quant=quant)) for quant in ("", "q8_0", "q4k")}
    assert {quant: runner.facts.quant for quant, runner in runners.items()} == {"": "", "q8_0": "q8_0", "q4k": "q4k"}
    bytes_by_quant = {quant: runner.facts.step_bytes for quant, runner in runners.items()}
    if runners[""].ops.quantized:
        assert bytes_by_quant["q4k"] < 0.75 * bytes_by_quant["q8_0"] < 0.5 * bytes_by_quant[""]
    else:
        assert bytes_by_quant["q4k"] == bytes_by_quant["q8_0"] == bytes_by_quant[""]
    (expected,) = decode(in_float32(tmp_path, "q4k"), [list(range(40))], steps=1)
    (result,) = decode(runners["q4k"], [list(range(40))], steps=1)
    assert torch.cosine_similarity(result[1], expected[1]) > 0.98
