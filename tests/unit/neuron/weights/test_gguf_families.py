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
from neuron.weights.hf_to_gguf import rope_factors, write_model
from nightly import daily

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
ROUTED = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "topk_group": 1,
}
LATENT = {key: size for key, size in SHAPE.items() if key != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "use_conv_bias": True}
SHARED = {"shared_expert_intermediate_size": 64}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "ministral3": SHAPE
    | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.125}},
    "granite": SHAPE
    | {"attention_multiplier": 0.25, "embedding_multiplier": 8.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "granitemoe": SHAPE | {"head_dim": 16, "num_local_experts": 4, "attention_multiplier": 0.25},
    "granitemoeshared": SHAPE | {"head_dim": 16, "num_local_experts": 4, "shared_intermediate_size": 80},
    "granite_swa": SHAPE | {"head_dim": 16, "layer_rope_theta": [0, 10000.0, 10000.0, 0], "sliding_window": 48},
    "olmo2": SHAPE | {"head_dim": 16, "pad_token_id": None},
    "olmo3": SHAPE
    | {
        "head_dim": 16,
        "pad_token_id": None,
        "sliding_window": 48,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    },
    "olmoe": SHAPE | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "exaone4": SHAPE | {"sliding_window": 48},
    "ernie4_5": SHAPE | {"use_bias": False},
    "hunyuan_v1_dense": SHAPE,
    "phi3": SHAPE | {"head_dim": 16, "pad_token_id": None, "original_max_position_embeddings": 512},
    "stablelm": SHAPE | {"head_dim": 16, "use_qkv_bias": True},
    "cohere": SHAPE | {"head_dim": 16, "logit_scale": 0.25},
    "cohere2": SHAPE | {"head_dim": 16, "logit_scale": 0.25, "sliding_window": 48},
    "seed_oss": SHAPE,
    "arcee": SHAPE | {"rope_parameters": YARN},
    "smollm3": SHAPE | {"head_dim": 16, "pad_token_id": None},
    "qwen2": SHAPE | {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3": SHAPE | {"rope_parameters": YARN},
    "qwen3_moe": SHAPE | EXPERTS | {"norm_topk_prob": True},
    "qwen3_next": SHAPE | EXPERTS | LINEAR | SHARED,
    "qwen3_5_text": SHAPE | LINEAR | {"num_hidden_layers": 5},
    "qwen3_5_moe_text": SHAPE | EXPERTS | LINEAR | SHARED | {"linear_num_value_heads": 2},
    "lfm2": SHAPE | {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": SHAPE | EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "glm4_moe": SHAPE | ROUTED | {"use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": ROUTED | LATENT | {"num_hidden_layers": 47, "vocab_size": 154880},
    "ernie4_5_moe": SHAPE | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_interval": 2},
    "minimax_m2": SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": ROUTED | LATENT | {"q_lora_rank": None, "n_group": 2, "topk_method": "group_limited_greedy"},
    "deepseek_v3": ROUTED | LATENT | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "granitemoehybrid": SHAPE
    | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
    | {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "attention_multiplier": 0.25}
    | {"num_local_experts": 4, "shared_intermediate_size": 32, "position_embedding_type": "nope"},
    "nemotron_h": SHAPE | MAMBA | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "gemma": SHAPE,
    "glm4": SHAPE
    | {
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gemma2": SHAPE | {"sliding_window": 48, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0},
    "gemma3_text": SHAPE | {"num_hidden_layers": 7, "sliding_window": 48, "query_pre_attn_scalar": 32},
    "gemma4_text": SHAPE
    | {
        "num_hidden_layers": 7,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            *["sliding_attention", "full_attention"] * 2,
        ],
        "sliding_window": 48,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": SHAPE["vocab_size"],
        "final_logit_softcapping": 30.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": SHAPE
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48, "max_position_embeddings": 131072},
}


# Keys of a Hugging Face configuration that GGUF files lack; these keys do not affect the outputs of the model.
TRAINING = {"attention_dropout", "initializer_range", "output_router_logits", "router_aux_loss_coef", "use_cache"}
NOT_STATED = {"block_auto_adjust_ff_dim", "rope_parameters"}
"""Keys of helexa's configuration that the configurations of some families lack."""
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}


def tiny(kind: str) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    config = AutoConfig.for_model(kind, **FAMILIES[kind])
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


@pytest.mark.parametrize("kind", daily(FAMILIES.keys() - {"glm4_moe_lite"}, FAMILIES))
def test_configuration_read_from_gguf_equals_the_original_of_transformers(kind: str, tmp_path: Path) -> None:
    checkpoint, config, _ = opened(kind, tmp_path)
    with checkpoint:
        ours = dict(checkpoint.config)
    assert ours.pop("model_type") == kind.removesuffix("_text")
    rebuilt = AutoConfig.for_model(kind, **ours).to_dict()
    original = config.to_dict()
    # transformers calls `num_experts` `num_local_experts` in some models, and `head_dim` `qk_rope_head_dim` in one. It
    # does not state the number of layers if it lists them. `per_layer_config` contains the shape of some layers of
    # Gemma 4.
    other_names = {"num_experts", "head_dim", "num_hidden_layers"}
    shape = {"global_head_dim", "num_global_key_value_heads"}
    assert ours.keys() <= rebuilt.keys() | other_names | (shape if "gemma4" in kind else set())
    ours_only = rebuilt.keys() - original.keys() - {"rms_norm_eps"}
    assert ours_only <= NOT_STATED | {"attention_bias", "head_dim", "norm_topk_prob"}
    for key in ours_only & NOT_STATED:
        rebuilt.pop(key)
    (epsilon,) = {"rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"} & original.keys()
    assert rebuilt.pop(epsilon) == pytest.approx(original.pop(epsilon))
    rebuilt.pop("rms_norm_eps", None)
    for stated in (rebuilt, original):
        rope = stated.get("rope_parameters", {})
        for kind_of_layer in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            if "rope_type" in kind_of_layer:
                kind_of_layer.setdefault("partial_rotary_factor", 1.0)
            if kind_of_layer.get("rope_type") == "proportional":
                del kind_of_layer["partial_rotary_factor"]  # GGUF files have a tensor instead
        for key in TRAINING | TOKENS:
            stated.pop(key, None)
        if not stated.get("use_sliding_window", True):
            stated.pop("sliding_window")
    # The GGUF configuration states these keys also for families whose configuration lacks them.
    for key in {"attention_bias", "head_dim", "norm_topk_prob"} - original.keys():
        rebuilt.pop(key, None)
    assert rebuilt == original


@pytest.mark.parametrize("kind", daily(FAMILIES.keys() - {"glm4_moe_lite"}, FAMILIES))
def test_tensors_read_from_gguf_equal_the_hugging_face_originals(kind: str, tmp_path: Path) -> None:
    checkpoint, config, state = opened(kind, tmp_path)
    expected = dict(rope_factors(config))
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
    name = name.replace("mlp.gate.moe_statics", "mlp.moe_statics")
    if config.model_type == "minimax_m2":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    stem, _, last = name.rpartition(".")
    if name.endswith("in_proj_qkvz.weight"):
        value_rows = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        groups = tensor.unflatten(0, (config.linear_num_key_heads, -1))
        q, k, v, z = groups.split([config.linear_key_head_dim] * 2 + [value_rows] * 2, dim=1)
        qkv = torch.cat([rows.flatten(0, 1) for rows in (q, k, v)])
        return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z.flatten(0, 1)}
    if ".shared_mlp." in name:
        names = ("gate_proj", "up_proj") if "input_linear" in name else ("down_proj",)
        parts = zip(names, tensor.chunk(len(names)), strict=True)
        return {f"{stem.rpartition('.')[0]}.{projection}.weight": rows for projection, rows in parts}
    if name.endswith("kv_b_proj.weight"):
        heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    if not stem.endswith(".experts"):
        return {name: tensor}
    kind = "bias" if last.endswith("_bias") else "weight"
    rows_first = tensor.transpose(1, 2) if config.model_type == "gpt_oss" and kind == "weight" else tensor
    if config.model_type in ("lfm2_moe", "minimax_m2"):
        names = ("w1", "w3") if last == "gate_up_proj" else ("w2",)
        return {f"{stem}.{name}.weight": rows for name, rows in zip(names, tensor.chunk(len(names), 1), strict=True)}
    if not last.startswith("gate_up"):
        return {f"{stem}.down_proj.{kind}": rows_first}
    if config.model_type == "gemma4_text":
        return {name: tensor}
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


def test_full_attention_interval_is_read_from_the_gguf_file_and_defaults_to_4(tmp_path: Path) -> None:
    linear, full = "linear_attention", "full_attention"
    config = rewritten("qwen3_5_text", tmp_path, replace_key("attention.recurrent_layers", None))
    assert config["layer_types"] == [linear, linear, linear, full, linear]

    def every_second(writer: gguf.GGUFWriter) -> None:
        replace_key("attention.recurrent_layers", None)(writer)
        writer.add_uint32("qwen35.full_attention_interval", 2)

    assert rewritten("qwen3_5_text", tmp_path, every_second)["layer_types"] == [linear, full, linear, full, linear]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_gguf_file_of_ollamas_converter_gives_the_config_and_tensors_of_a_usual_file(kind: str, tmp_path: Path) -> None:
    config, state = tiny(kind)
    full = [layer == "full_attention" for layer in config.layer_types]

    def ollama(writer: gguf.GGUFWriter) -> None:
        replace_key("attention.recurrent_layers", None)(writer)
        kv_heads = [config.num_key_value_heads * is_full for is_full in full]
        replace_key("attention.head_count_kv", lambda writer, key: writer.add_array(key, kv_heads))(writer)
        writer.add_array(f"{writer.arch}.rope.dimension_sections", [11, 11, 10])
        writer.add_bool(f"{writer.arch}.ssm.v_head_reordered", True)
        writer.add_uint32(f"{writer.arch}.vision.block_count", 1)
        add = writer.add_tensor
        for name in ("v.blk.0.attn_q.weight", "mtp.fc.weight", "mtp.layers.0.attn_q.weight"):
            add(name, np.ones((2, 2), np.float32))
        renamed = lambda name, tensor: add(name.replace("ssm_dt.bias", "ssm_dt"), tensor)  # noqa: E731
        writer.add_tensor = renamed  # pyright: ignore[reportAttributeAccessIssue]

    assert 0 < sum(full) < len(full)
    with (
        GgufCheckpoint(write_model(tmp_path / "model.gguf", config, state)) as expected,
        GgufCheckpoint(write_model(tmp_path / "ollama.gguf", config, state, ollama)) as checkpoint,
    ):
        assert checkpoint.config == expected.config
        assert set(checkpoint.names()) == set(expected.names())
        for name in expected.names():
            assert torch.equal(checkpoint.read(name), expected.read(name)), name  # pyright: ignore[reportArgumentType]


def test_gguf_file_with_value_heads_in_the_original_order_is_rejected(tmp_path: Path) -> None:
    def grouped(writer: gguf.GGUFWriter) -> None:
        writer.add_bool(f"{writer.arch}.ssm.v_head_reordered", False)

    with pytest.raises(ModelFileError, match=r"ssm\.v_head_reordered is False, which is not supported"):
        rewritten("qwen3_5_text", tmp_path, grouped)


def test_sliding_window_layers_of_gemma3_are_derived_from_the_gguf_keys(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("kind", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_only_the_largest_gemma_scales_queries_by_hidden_size_per_head(kind: str, layers: int, tmp_path: Path) -> None:
    assert rewritten(kind, tmp_path, lambda writer: None)["query_pre_attn_scalar"] == 32
    large = replace_key("block_count", lambda writer, key: writer.add_uint32(key, layers))
    assert rewritten(kind, tmp_path, large)["query_pre_attn_scalar"] == 64 // 4


@pytest.mark.parametrize(("stated", "expected"), [(None, 50.0), (0.0, None), (7.0, 7.0)])
def test_gguf_soft_cap_of_gemma2_defaults_to_50_and_value_0_disables_it(
    stated: float | None, expected: float | None, tmp_path: Path
) -> None:
    add = None if stated is None else lambda writer, key: writer.add_float32(key, stated)
    config = rewritten("gemma2", tmp_path, replace_key("attn_logit_softcapping", add))
    assert config["attn_logit_softcapping"] == expected


def test_gguf_llama_with_a_sliding_window_is_read_as_mistral(tmp_path: Path) -> None:
    config = rewritten("llama", tmp_path, lambda writer: writer.add_sliding_window(64))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_gguf_mistral3_without_a_temperature_is_read_as_mistral(tmp_path: Path) -> None:
    config = rewritten("ministral3", tmp_path, replace_key("attention.temperature_scale", None))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", None)


def test_rope_scaling_factor_without_a_type_is_read_as_linear_scaling(tmp_path: Path) -> None:
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
        (
            "qwen3_next",
            "nextn_predict_layers",
            lambda writer, key: writer.add_uint32(key, 4),
            "less than block_count, 4",
        ),
        ("qwen3_5_text", "attention.recurrent_layers", lambda writer, key: writer.add_array(key, [True]), "5 booleans"),
        ("gpt_oss", "attention.sliding_window", None, "is missing"),
        (
            "nemotron_h",
            "feed_forward_length",
            lambda writer, key: writer.add_array(key, [0, 9, 0, 8]),
            "expected 0 and only one other number",
        ),
        ("nemotron_h", "ssm.inner_size", lambda writer, key: writer.add_uint32(key, 97), "divide into 4 heads"),
        ("lfm2", "attention.head_count_kv", lambda writer, key: writer.add_array(key, [0, 2, 1, 0]), "has 2 different"),
        ("lfm2", "attention.head_count_kv", lambda writer, key: writer.add_array(key, [0, 2]), "each of 4 layers"),
        (
            "gpt_oss",
            "attention.sliding_window_pattern",
            lambda writer, key: writer.add_array(key, ["a"] * 4),
            "a list of 4 booleans",
        ),
        ("gemma4_text", "attention.key_length_swa", None, "is missing"),
        ("gemma4_text", "attention.value_length_swa", lambda writer, key: writer.add_uint32(key, 16), "differs from"),
        (
            "gemma4_text",
            "attention.head_count_kv",
            lambda writer, key: writer.add_array(key, [2, 2, 1, 1, 1, 2, 1]),
            "differs between layers of the same type",
        ),
        (
            "gemma4_text",
            "feed_forward_length",
            lambda writer, key: writer.add_array(key, [96, 96, 96, 96, 192, 192, 192]),
            "in the last 2 layers",
        ),
        (
            "gemma4_text",
            "attention.shared_kv_layers",
            lambda writer, key: writer.add_uint32(key, 7),
            "number of layers, 7",
        ),
        ("gemma4_text", "final_logit_softcapping", lambda writer, key: writer.add_float32(key, -1.0), "positive"),
    ],
)
def test_error_for_an_invalid_or_missing_gguf_key_names_the_key(
    kind: str, key: str, add: Callable[[gguf.GGUFWriter, str], None] | None, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=rf"^model\.gguf: key [\w-]+\.{key} .*{problem}"):
        rewritten(kind, tmp_path, replace_key(key, add))


def test_value_heads_not_divisible_by_key_heads_are_rejected(tmp_path: Path) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        replace_key("ssm.time_step_rank", lambda writer, key: writer.add_uint32(key, 3))(writer)

    with pytest.raises(ModelFileError, match="has 3 value heads, expected a multiple of its 2 key heads"):
        rewritten("qwen3_5_text", tmp_path, keys)


def test_gguf_whose_last_layers_are_no_multi_token_prediction_is_rejected(tmp_path: Path) -> None:
    config, state = tiny("qwen3_5_text")
    with pytest.raises(ModelFileError, match=r"the last 1 of \d layers should be .* such as blk\.\d\."):
        write_model(tmp_path / "model.gguf", config, state, lambda writer: writer.add_nextn_predict_layers(1))
        GgufCheckpoint(tmp_path / "model.gguf")


def test_multi_token_prediction_layers_at_the_end_of_a_gguf_file_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    skipped = f"tensors={count} first=blk.4.nextn.eh_proj.weight,blk.4."
    assert [skipped in record.getMessage() for record in caplog.records] == [True]
