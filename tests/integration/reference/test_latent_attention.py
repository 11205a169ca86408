"""Models with latent attention compared with transformers in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.ops.native.native_ops import NativeOps
from nightly import daily
from tiny_models import assert_equal_to, decode, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
DEEPSEEK_V2 = SHAPE | {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "q_lora_rank": None}
DEEPSEEK_V3 = SHAPE | {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": YARN,
    "attention_bias": True,
}
GLM4_MOE_LITE = SHAPE | {"model_type": "glm4_moe_lite"}
VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2, groups, yarn": DEEPSEEK_V2
    | {
        "q_lora_rank": 48,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        "rope_parameters": YARN,
    },
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3, halves, no query latent": DEEPSEEK_V3 | {"rope_interleave": False, "q_lora_rank": None},
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm4_moe_lite, layer types": GLM4_MOE_LITE | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
}


@pytest.mark.parametrize("variant", daily(["deepseek_v2, groups, yarn", "deepseek_v3", "glm4_moe_lite"], VARIANTS))
def test_logits_and_greedy_tokens_match_transformers(variant: str, tmp_path: Path) -> None:
    assert_equal_to(tiny_model(tmp_path, **VARIANTS[variant]), in_float32(tmp_path))


def test_native_logits_are_close_to_float32_and_do_not_depend_on_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tiny_model(tmp_path, **DEEPSEEK_V3)
    runner = load_once(tmp_path, EngineOptions(kv_cache_mb=8))
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
    assert errors.median() < 0.03 * exact[0][1].std()


@pytest.mark.parametrize(
    ("settings", "wrong", "name_in_error"),
    [
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK_V3, {"kv_lora_rank": 48}, "kv_a_proj_with_mqa"),
        (DEEPSEEK_V3, {"v_head_dim": 48}, "kv_b_proj"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
    ],
)
def test_unsupported_or_invalid_setting_is_named_in_the_error(
    settings: dict[str, Any], wrong: dict[str, Any], name_in_error: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(ModelFileError, match=name_in_error):
        in_float32(tmp_path)


def in_float32(folder: Path) -> Runner:
    return load_once(folder, EngineOptions(dtype="float32", kv_cache_mb=8))
