from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from neuron.weights.hf_to_gguf import write_model

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
SHARED = {"shared_expert_intermediate_size": 64}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
TOOL_CALL_FORMATS: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "qwen2": SHAPE | {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3": SHAPE | {"rope_parameters": YARN},
    "qwen3_moe": SHAPE | EXPERTS | {"norm_topk_prob": True},
    "qwen3_next": SHAPE | EXPERTS | LINEAR | SHARED,
    "qwen3_5_text": SHAPE | LINEAR | {"num_hidden_layers": 5},
    "qwen3_5_moe_text": SHAPE | EXPERTS | LINEAR | SHARED | {"linear_num_value_heads": 2},
    "gemma3_text": SHAPE | {"num_hidden_layers": 7, "sliding_window": 48, "query_pre_attn_scalar": 32},
    "gpt_oss": SHAPE
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48, "max_position_embeddings": 131072},
}


# Keys of a Hugging Face configuration that GGUF files lack; these keys do not affect the outputs of the model.
TRAINING = {"attention_dropout", "initializer_range", "output_router_logits", "router_aux_loss_coef", "use_cache"}
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}


def tiny(kind: str) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    config = AutoConfig.for_model(kind, **TOOL_CALL_FORMATS[kind])
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    generator = torch.Generator().manual_seed(13)
    state = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in shapes.items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return config, state


def opened(kind: str, folder: Path) -> tuple[GgufCheckpoint, PreTrainedConfig, dict[str, Tensor]]:
    config, state = tiny(kind)
    return GgufCheckpoint(write_model(folder / "model.gguf", config, state)), config, state


@pytest.mark.parametrize("kind", TOOL_CALL_FORMATS)
def test_configuration_equals_the_original_of_transformers(kind: str, tmp_path: Path) -> None:
    checkpoint, config, _ = opened(kind, tmp_path)
    with checkpoint:
        ours = dict(checkpoint.config)
    assert ours.pop("model_type") == kind.removesuffix("_text")
    rebuilt = AutoConfig.for_model(kind, **ours).to_dict()
    original = config.to_dict()
    # transformers calls `num_experts` `num_local_experts` in some models.
    assert ours.keys() <= rebuilt.keys() | {"num_experts"}
    assert rebuilt.pop("rms_norm_eps") == pytest.approx(original.pop("rms_norm_eps"))
    for stated in (rebuilt, original):
        rope = stated["rope_parameters"]
        for kind_of_layer in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            if "rope_type" in kind_of_layer:
                kind_of_layer.setdefault("partial_rotary_factor", 1.0)
        for key in TRAINING | TOKENS:
            stated.pop(key, None)
        if not stated.get("use_sliding_window", True):
            stated.pop("sliding_window")
    # The GGUF configuration states these keys also for families whose configuration lacks them.
    for key in {"attention_bias", "head_dim", "norm_topk_prob"} - original.keys():
        rebuilt.pop(key, None)
    assert rebuilt == original


@pytest.mark.parametrize("kind", TOOL_CALL_FORMATS)
def test_tensors_equal_the_hugging_face_originals(kind: str, tmp_path: Path) -> None:
    checkpoint, config, state = opened(kind, tmp_path)
    expected: dict[str, Tensor] = {}
    for name, tensor in state.items():
        expected |= gguf_tensors(config, name, tensor)
    with checkpoint:
        assert set(checkpoint.names()) == set(expected)
        for name, tensor in expected.items():
            read = checkpoint.read(name)
            assert isinstance(read, Tensor)
            assert checkpoint.shape(name) == read.shape == tensor.shape
            # Norms are stored with 1 added and A_log as exponentials, which rounds.
            exact = not name.endswith(("norm.weight", "A_log"))
            assert torch.allclose(read, tensor, rtol=0, atol=0 if exact else 1e-6), name


def gguf_tensors(config: PreTrainedConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a GGUF checkpoint has instead of one Hugging Face tensor.

    They differ for experts and for the fused projections of qwen3_next.
    """
    stem, _, last = name.rpartition(".")
    if name.endswith("in_proj_qkvz.weight"):
        value_rows = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        groups = tensor.unflatten(0, (config.linear_num_key_heads, -1))
        q, k, v, z = groups.split([config.linear_key_head_dim] * 2 + [value_rows] * 2, dim=1)
        qkv = torch.cat([rows.flatten(0, 1) for rows in (q, k, v)])
        return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z.flatten(0, 1)}
    if not stem.endswith(".experts"):
        return {name: tensor}
    kind = "bias" if last.endswith("_bias") else "weight"
    rows_first = tensor.transpose(1, 2) if config.model_type == "gpt_oss" and kind == "weight" else tensor
    if not last.startswith("gate_up"):
        return {f"{stem}.down_proj.{kind}": rows_first}
    gate, up = rows_first.chunk(2, dim=1)
    if config.model_type == "gpt_oss":
        gate, up = rows_first[:, 0::2], rows_first[:, 1::2]
    return {f"{stem}.gate_proj.{kind}": gate, f"{stem}.up_proj.{kind}": up}


def rewritten(kind: str, folder: Path, keys: Callable[[gguf.GGUFWriter], None]) -> dict[str, Any]:
    config, state = tiny(kind)
    with GgufCheckpoint(write_model(folder / "model.gguf", config, state, keys)) as checkpoint:
        return checkpoint.config


def replace_key(key: str, add: Callable[[gguf.GGUFWriter, str], None] | None) -> Callable[[gguf.GGUFWriter], None]:
    def keys(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
        if add is not None:
            add(writer, f"{writer.arch}.{key}")

    return keys


def test_attention_interval_is_four_or_read_from_the_file(tmp_path: Path) -> None:
    linear, full = "linear_attention", "full_attention"
    config = rewritten("qwen3_5_text", tmp_path, replace_key("attention.recurrent_layers", None))
    assert config["layer_types"] == [linear, linear, linear, full, linear]

    def every_second(writer: gguf.GGUFWriter) -> None:
        replace_key("attention.recurrent_layers", None)(writer)
        writer.add_uint32("qwen35.full_attention_interval", 2)

    assert rewritten("qwen3_5_text", tmp_path, every_second)["layer_types"] == [linear, full, linear, full, linear]


def test_gemma3_sliding_window_layers(tmp_path: Path) -> None:
    local, full = "sliding_attention", "full_attention"
    pattern = "attention.sliding_window_pattern"
    listed = replace_key(
        pattern, lambda writer, key: writer.add_array(key, [True, False, False, True, True, False, True])
    )
    config = rewritten("gemma3_text", tmp_path, listed)
    assert config["layer_types"] == [local, full, full, local, local, full, local]
    counted = replace_key(pattern, lambda writer, key: writer.add_uint32(key, 3))
    assert rewritten("gemma3_text", tmp_path, counted)["layer_types"] == [local, local, full, local, local, full, local]
    none = rewritten("gemma3_text", tmp_path, replace_key("attention.sliding_window", None))
    assert none["layer_types"] == [full] * 7
    assert "sliding_window" not in none


def test_only_the_largest_gemma3_scales_queries_by_hidden_size(tmp_path: Path) -> None:
    assert rewritten("gemma3_text", tmp_path, lambda writer: None)["query_pre_attn_scalar"] == 32
    large = replace_key("block_count", lambda writer, key: writer.add_uint32(key, 62))
    assert rewritten("gemma3_text", tmp_path, large)["query_pre_attn_scalar"] == 64 // 4


def test_llama_with_a_sliding_window_becomes_mistral(tmp_path: Path) -> None:
    config = rewritten("llama", tmp_path, lambda writer: writer.add_sliding_window(64))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_rope_factor_without_a_type_is_linear_scaling(tmp_path: Path) -> None:
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        config = rewritten("llama", tmp_path, lambda writer, key=key: writer.add_float32(key, 8.0))
        assert config["rope_parameters"]["rope_type"] == "linear"
        assert config["rope_parameters"]["factor"] == 8


@pytest.mark.parametrize(
    ("kind", "key", "add", "problem"),
    [
        ("llama", "expert_count", lambda writer, key: writer.add_uint32(key, 8), "mixture of experts"),
        ("qwen3_moe", "expert_weights_scale", lambda writer, key: writer.add_float32(key, 2.5), "not supported"),
        ("qwen3_moe", "expert_weights_norm", lambda writer, key: writer.add_uint32(key, 1), "neither true nor false"),
        ("qwen3_next", "ssm.inner_size", lambda writer, key: writer.add_uint32(key, 95), "divide into 6 heads"),
        ("qwen3_next", "ssm.group_count", None, "is missing"),
        ("qwen3_next", "nextn_predict_layers", lambda writer, key: writer.add_uint32(key, 4), "none of 4 layers"),
        ("qwen3_5_text", "attention.recurrent_layers", lambda writer, key: writer.add_array(key, [True]), "5 layers"),
        ("gpt_oss", "attention.sliding_window", None, "is missing"),
        (
            "gpt_oss",
            "attention.sliding_window_pattern",
            lambda writer, key: writer.add_array(key, ["a"] * 4),
            "a boolean for each of 4 layers",
        ),
    ],
)
def test_error_names_the_invalid_key(
    kind: str, key: str, add: Callable[[gguf.GGUFWriter, str], None] | None, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=rf"^model\.gguf: key [\w-]+\.{key} .*{problem}"):
        rewritten(kind, tmp_path, replace_key(key, add))


def test_value_heads_not_divisible_by_key_heads_are_rejected(tmp_path: Path) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        replace_key("ssm.time_step_rank", lambda writer, key: writer.add_uint32(key, 3))(writer)

    with pytest.raises(ModelFileError, match="3 value heads of linear attention do not share 2 key heads"):
        rewritten("qwen3_5_text", tmp_path, keys)


def test_multi_token_prediction_layers_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, state = tiny("qwen3_5_text")
    config.num_hidden_layers, all_tensors = 4, len(state)
    kept_names = [name for name in state if ".layers.4." not in name]

    def keys(writer: gguf.GGUFWriter) -> None:
        replace_key("block_count", lambda writer, key: writer.add_uint32(key, 5))(writer)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))

    with (
        caplog.at_level("INFO", "helexa.neuron.weights"),
        GgufCheckpoint(write_model(tmp_path / "model.gguf", config, state, keys)) as checkpoint,
    ):
        assert checkpoint.config["num_hidden_layers"] == len(checkpoint.config["layer_types"]) == 4
        assert checkpoint.names() == kept_names
        assert checkpoint.total_bytes == sum(state[name].nbytes for name in kept_names)
    count = all_tensors - len(kept_names) + 1
    skipped = f"skipped {count} tensors of multi-token prediction: blk.4.nextn.eh_proj.weight, blk.4."
    assert [skipped in record.getMessage() for record in caplog.records] == [True]
