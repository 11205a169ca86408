"""Mixtures of experts compared with transformers in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.ops.native.native_ops import NativeOps
from tiny_models import assert_equal_to, decode, tiny_model

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
    "num_experts_per_tok": 3,
}
QWEN3_MOE = SHAPE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32}
GPT_OSS = SHAPE | {
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "sliding_window": 40,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
GLM4_MOE = SHAPE | {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "use_qk_norm": True,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
MINIMAX_M2 = SHAPE | {
    "model_type": "minimax_m2",
    "num_local_experts": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
OLMOE = SHAPE | {"model_type": "olmoe", "head_dim": 16, "num_experts": 8}
ERNIE4_5_MOE = SHAPE | {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 32,
    "moe_layer_end_index": 1,
    "use_bias": True,
    "tie_word_embeddings": False,
}
del ERNIE4_5_MOE["num_experts_per_tok"]
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, normalized": QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3_moe, some dense": QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    "qwen3_moe, windows": QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 40},
    "glm4_moe": GLM4_MOE,
    "glm4_moe, one group, not normalized": GLM4_MOE | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "minimax_m2": MINIMAX_M2,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "olmoe": OLMOE,
    "olmoe, normalized": OLMOE | {"norm_topk_prob": True},
    "gpt_oss": GPT_OSS,
    "gpt_oss, other types": GPT_OSS | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "gpt_oss, limits that bite": GPT_OSS | {"swiglu_limit": 0.3, "swiglu_alpha": 2.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_match_transformers(variant: str, tmp_path: Path) -> None:
    assert_equal_to(tiny_model(tmp_path, **VARIANTS[variant]), in_float32(tmp_path))


@pytest.mark.parametrize("settings", [QWEN3_MOE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def test_equal_router_scores_select_the_same_experts_as_in_transformers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    reference = tiny_model(tmp_path, **settings)
    for name, parameter in reference.named_parameters():
        if "mlp.gate." in name or "mlp.router." in name:
            parameter.data[1::2] = parameter.data[
                0::2
            ]  # three of four equal pairs are chosen, so one pair always ties across the limit
    reference.save_pretrained(tmp_path)
    assert_equal_to(reference, in_float32(tmp_path))


def test_experts_stored_in_a_stacked_gate_up_tensor_match_transformers(tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **QWEN3_MOE)
    store(tmp_path, reference.state_dict())  # transformers stacks experts in memory, but saves them one by one
    assert_equal_to(reference, in_float32(tmp_path), brief=True)


@pytest.mark.parametrize("settings", [QWEN3_MOE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def test_experts_stored_in_one_tensor_per_projection_match_transformers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    reference = tiny_model(tmp_path, **settings)
    tensors: dict[str, Tensor] = {}
    for name, tensor in reference.state_dict().items():
        place, _, projection = name.partition(".experts.")
        if not projection:
            tensors[name] = tensor
            continue
        kind = "bias" if projection.endswith("_bias") else "weight"
        if settings is GPT_OSS and kind == "weight":
            tensor = tensor.mT  # [inputs, outputs]
        if projection.startswith("gate_up_proj"):
            gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if settings is GPT_OSS else tensor.chunk(2, dim=1)
            tensors |= {f"{place}.experts.gate_proj.{kind}": gate, f"{place}.experts.up_proj.{kind}": up}
        else:
            tensors[f"{place}.experts.down_proj.{kind}"] = tensor
    store(tmp_path, tensors)
    assert_equal_to(reference, in_float32(tmp_path), brief=True)


def test_experts_stored_as_mxfp4_blocks_match_transformers(tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, **GPT_OSS)
    tensors: dict[str, Tensor] = {}
    for name, tensor in reference.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        count, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 123, blocks.shape[:-1], dtype=torch.uint8)  # exponents, biased by 127
        tensor.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    store(tmp_path, tensors)
    state_in_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert_equal_to(reference, in_float32(tmp_path), brief=True)


@pytest.mark.parametrize(
    ("settings", "wrong", "name_in_error"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (QWEN3_MOE, {"num_local_experts": 7}, "mlp.gate"),
        (QWEN3_MOE, {"moe_intermediate_size": 48}, "experts.0.gate_proj"),
        (QWEN3_MOE, {"hidden_act": "gelu"}, "hidden_act"),
        (GPT_OSS, {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window"),
        (GPT_OSS, {"swiglu_alpha": 0}, "swiglu_alpha"),
        (GPT_OSS, {"num_local_experts": 7}, "mlp.router"),
        (ERNIE4_5_MOE, {"moe_k": 9}, "moe_k"),
        (ERNIE4_5_MOE, {"moe_layer_end_index": "1"}, "moe_layer_end_index"),
        (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func"),
        (MINIMAX_M2, {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv"),
        (GLM4_MOE, {"n_group": 3}, "'n_group' is 3, expected a divisor of the number of experts, 8"),
        (GLM4_MOE, {"n_group": 8}, "'n_group' is 8, so a group has 1 of 8 experts, expected at least 2"),
        (GLM4_MOE, {"topk_group": 5}, "'topk_group' is 5, expected at most 'n_group', 4"),
        (GLM4_MOE, {"topk_group": 1}, "'topk_group' is 1, so a token can use 2 experts, expected at least the 3"),
        (GLM4_MOE, {"scoring_func": "softmax"}, "scoring_func"),
        (GLM4_MOE, {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
    ],
)
def test_unsupported_or_invalid_setting_is_named_in_the_error(
    settings: dict[str, Any], wrong: dict[str, Any], name_in_error: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, **settings)
    state_in_config(tmp_path, **wrong)
    with pytest.raises(ModelFileError, match=name_in_error):
        in_float32(tmp_path)


@pytest.mark.parametrize("quant", ["", "q8_0"])
@pytest.mark.parametrize("settings", [QWEN3_MOE, GPT_OSS, GLM4_MOE], ids=["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_native_logits_are_close_to_float32_and_do_not_depend_on_the_batch(
    settings: dict[str, Any], quant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tiny_model(tmp_path, **settings)
    runner = load_once(tmp_path, EngineOptions(kv_cache_mb=8, quant=quant))
    if runner.ops.name != NativeOps.name:
        pytest.skip("no C compiler on this machine: plain torch serves")
    prompts = [[(37 * n + 7 * i * i) % SHAPE["vocab_size"] for i in range(n)] for n in (1, 5, 64, 65, 150)]
    together = decode(runner, prompts, steps=12, max_step_tokens=48)
    for prompt, (tokens, logits) in zip(prompts, together, strict=True):
        [(separately, logits_alone)] = decode(runner, [prompt], steps=12)
        assert tokens == separately
        assert torch.equal(logits, logits_alone)
    assert "outside the native kernels" not in caplog.text

    exact = decode(in_float32(tmp_path), prompts, steps=1)
    errors = torch.cat([(near[0] - right[0]).abs() for (_, near), (_, right) in zip(together, exact, strict=True)])
    assert (
        errors.median() < 0.03 * exact[0][1].std()
    )  # the largest errors are from roundings that change the choice of an expert


def in_float32(folder: Path) -> Runner:
    return load_once(folder, EngineOptions(dtype="float32", kv_cache_mb=8))


def store(folder: Path, tensors: dict[str, Tensor]) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def state_in_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
