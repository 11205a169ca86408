"""Model files with tensors or settings that the architecture does not read: rejected from the headers alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor, ones, zeros
from transformers import PreTrainedModel

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.build import Build
from neuron.weights.hf_to_gguf import write_model
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
Keys = Callable[[gguf.GGUFWriter], None]


def estimate(path: Path) -> None:
    """Estimate the memory of a model, which reads only the headers of its files."""
    with Build(path, EngineOptions(dtype="float32", kv_cache_mb=1)) as build:
        build.request()


def gguf_model(folder: Path, keys: Keys, model_type: str = "llama", **settings: Any) -> Path:
    model = tiny_model(folder, **SHAPE | settings, model_type=model_type)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return write_model(folder / "model.gguf", model.config, state, keys)


def folder_model(
    folder: Path, model_type: str = "llama", config: dict[str, Any] | None = None, **tensors: Tensor
) -> Path:
    model: PreTrainedModel = tiny_model(folder, **SHAPE, model_type=model_type)
    model.save_pretrained(folder, max_shard_size="1GB")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})
    if config:
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | config))
    return folder


def tensor(name: str, *shape: int) -> Keys:
    return lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_q_norm.weight", (32,)),
        ("blk.1.attn_sub_norm.weight", (64,)),
        ("blk.0.attn_norm.bias", (64,)),
        ("blk.2.attn_norm.weight", (64,)),
        ("blk.0.ffn_gate_inp.weight", (4, 64)),
        ("output.bias", (64,)),
        ("cls.output.weight", (2, 64)),
        ("dense_2.weight", (64, 64)),
        ("rope_factors_long.weight", (16,)),
    ],
)
def test_gguf_tensor_that_the_architecture_does_not_read_is_rejected(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    path = gguf_model(tmp_path, tensor(name, *shape))
    with pytest.raises(ModelFileError, match=f"a tensor that the architecture 'llama' does not read: {name};"):
        estimate(path)


def test_error_lists_the_first_unread_tensors_and_their_number(tmp_path: Path) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        for layer in range(2):
            for part in "qk":
                tensor(f"blk.{layer}.attn_{part}_norm.weight", 32)(writer)

    with pytest.raises(
        ModelFileError, match=r"4 tensors that .*: blk\.0\.attn_q_norm\.weight, .*k_norm\.weight, .* \.\.;"
    ):
        estimate(gguf_model(tmp_path, keys))


def test_gguf_bias_of_the_output_head_is_accepted_for_qwen2(tmp_path: Path) -> None:
    estimate(gguf_model(tmp_path, tensor("output.bias", 64), "qwen2"))


def test_bias_of_a_tied_output_head_is_rejected(tmp_path: Path) -> None:
    path = gguf_model(tmp_path, tensor("output.bias", 64), "qwen2", tie_word_embeddings=True)
    with pytest.raises(ModelFileError, match=r"does not read: output\.bias"):
        estimate(path)


@pytest.mark.parametrize(
    ("model_type", "key", "value", "problem"),
    [
        ("llama", "rope.dimension_count", 16, "is 16, expected 32, the width of a head"),
        ("qwen3", "rope.dimension_count", 64, "is 64, expected at most 32, the width of a head"),
        ("qwen3", "attention.value_length", 16, "differs from 32"),
        ("llama", "attention.scale", 0.5, "differs from 1 / sqrt"),
        ("llama", "attn_logit_softcapping", 50.0, "is 50.0, which is not supported"),
        ("gemma3_text", "final_logit_softcapping", 30.0, "is 30.0, which is not supported"),
        ("llama", "logit_scale", 0.0625, "is 0.0625, which is not supported"),
        ("llama", "embedding_scale", 12.0, "is 12.0, which is not supported"),
        ("llama", "attention.causal", False, "is False, which is not supported"),
        ("qwen2", "expert_count", 4, "is 4, which is not supported"),
        ("qwen3_moe", "expert_gating_func", 2, "is 2, which is not supported"),
        ("qwen3_moe", "leading_dense_block_count", 1, "is 1, which is not supported"),
    ],
)
def test_gguf_key_that_changes_the_computation_is_rejected(
    model_type: str, key: str, value: Any, problem: str, tmp_path: Path
) -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32} if "moe" in model_type else {}

    def keys(writer: gguf.GGUFWriter) -> None:
        name = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(name, None)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(name, value)

    with pytest.raises(ModelFileError, match=rf"key \S+\.{key} {problem}"):
        estimate(gguf_model(tmp_path, keys, model_type, **experts))


def test_gguf_keys_with_neutral_values_are_accepted(tmp_path: Path) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_count(32)
        writer.add_attention_scale(32**-0.5)
        writer.add_logit_scale(1.0)
        writer.add_expert_count(0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)

    estimate(gguf_model(tmp_path, keys))


def test_missing_optional_gguf_keys_get_the_default_values_of_llama_cpp(tmp_path: Path) -> None:
    optional = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    optional += ("rope.dimension_count", "vocab_size")

    def keys(writer: gguf.GGUFWriter) -> None:
        for key in optional:
            writer.kv_data[0].pop(f"{writer.arch}.{key}", None)

    with Build(gguf_model(tmp_path, keys, num_key_value_heads=2), EngineOptions(dtype="float32")) as build:
        config = build.checkpoint.config
        build.request()
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (2, 32, 64)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
)
def test_error_names_a_missing_gguf_key_that_llama_cpp_requires(key: str, tmp_path: Path) -> None:
    path = gguf_model(tmp_path, lambda writer: writer.kv_data[0].pop(f"{writer.arch}.{key}") and None)
    with pytest.raises(ModelFileError, match=rf"key llama\.{key} is missing"):
        estimate(path)


@pytest.mark.parametrize(
    ("kind", "error"), [("longrope", "'short_factor'"), ("dynamic", "'dynamic'"), ("mrope", "'mrope'")]
)
def test_error_names_incomplete_or_unsupported_rope_scaling_of_a_gguf_file(
    kind: str, error: str, tmp_path: Path
) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(2.0)

    with pytest.raises(ModelFileError, match=error):
        estimate(gguf_model(tmp_path, keys))


def test_gguf_vocabulary_larger_than_the_embedding_is_rejected(tmp_path: Path) -> None:
    path = gguf_model(tmp_path, lambda writer: writer.add_token_list([str(number) for number in range(65)]))
    with pytest.raises(ModelFileError, match=r"tokens lists 65 tokens, but token_embd\.weight has only 64 rows"):
        estimate(path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.norm.bias",
        "score.weight",
    ],
)
def test_safetensors_tensor_that_the_architecture_does_not_read_is_rejected(name: str, tmp_path: Path) -> None:
    path = folder_model(tmp_path, **{name: ones(64)})
    with pytest.raises(ModelFileError, match=f"a tensor that the architecture 'llama' does not read: {name};"):
        estimate(path)


def test_tensors_that_the_computation_does_not_need_are_accepted(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn"
    names = [
        "rotary_emb.inv_freq",
        "masked_bias",
        "k_scale",
        "k_proj.k_scale",
        "q_proj.input_scale",
        "q_proj.activation_scale",
    ]
    unneeded = {f"{layer}.{name}": ones(1) for name in names}
    estimate(folder_model(tmp_path, **unneeded, **{"mtp.fc.weight": ones(1), "vision_tower.x.weight": ones(1)}))


def test_tensors_of_multi_token_prediction_layers_are_accepted_and_not_read(tmp_path: Path) -> None:
    drafting = {"model.layers.2.eh_proj.weight": ones(64, 128), "model.mtp_block.0.norm.weight": ones(64)}
    estimate(folder_model(tmp_path, config={"num_nextn_predict_layers": 1}, **drafting))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_weight_tensor_of_integers_is_rejected(name: str, tmp_path: Path) -> None:
    stored = load_file(folder_model(tmp_path) / "model.safetensors")[name]
    with pytest.raises(ModelFileError, match=f"tensor {name} has the dtype int32, expected floating-point numbers"):
        estimate(folder_model(tmp_path, **{name: stored.int()}))


def test_missing_output_head_is_rejected_if_embeddings_are_not_tied(tmp_path: Path) -> None:
    path = folder_model(tmp_path, config={"tie_word_embeddings": False})
    state = load_file(path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"'tie_word_embeddings' is false, but the tensor lm_head"):
        estimate(path)


def test_output_head_stored_beside_a_tied_embedding_is_accepted(tmp_path: Path) -> None:
    head = {"lm_head.weight": zeros(64, 64)}
    estimate(folder_model(tmp_path, config={"tie_word_embeddings": True}, **head))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"attention_bias": True}, "'attention_bias' is True, but the model has no tensors of these biases"),
        ({"mlp_bias": True}, "'mlp_bias' is True, but the model has no tensors of these biases"),
        ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0, supported: None, 0"),
        ({"embedding_multiplier": 12.0}, "'embedding_multiplier' is 12.0"),
        ({"logits_scaling": 8.0}, "'logits_scaling' is 8.0"),
        ({"is_causal": False}, "'is_causal' is False"),
        ({"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid'"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear', expected an object"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' is '1e-5', expected a number above 0 and below 1"),
        ({"num_key_value_heads": 3}, "attention heads is 2, expected a multiple of the number of KV heads, 3"),
        ({"head_dim": 7}, "the width of a head is 7, expected an even number"),
    ],
)
def test_unsupported_setting_that_changes_the_computation_is_rejected(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = folder_model(tmp_path, config=config)
    with pytest.raises(ModelFileError, match=problem):
        estimate(path)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}}, 384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1.2, "original_max_position_embeddings": 96}}, 128),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 96}}, 192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 128),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 96}}, 128),
    ],
)
def test_yarn_scaling_extends_the_context_length_by_its_factor(
    config: dict[str, Any], context: int, tmp_path: Path
) -> None:
    # The cards of Qwen's models add YaRN, but leave `max_position_embeddings`.
    with Build(folder_model(tmp_path, config=config), EngineOptions(dtype="float32", kv_cache_mb=1)) as build:
        assert build.request().context == context


@pytest.mark.parametrize(("trained", "context"), [(96, 96), (262144, 128), (None, 128), (0, 128)])
def test_context_length_is_limited_to_where_dual_chunk_attention_begins(
    trained: int | None, context: int, tmp_path: Path
) -> None:
    chunks = {"chunk_size": 96, "local_size": 8, "original_max_position_embeddings": trained}
    path = folder_model(tmp_path, config={"dual_chunk_attention_config": chunks})
    with Build(path, EngineOptions(dtype="float32", kv_cache_mb=1)) as build:
        assert build.request().context == context


def test_bias_tensors_that_the_configuration_excludes_are_rejected(tmp_path: Path) -> None:
    path = folder_model(tmp_path, **{"model.layers.1.self_attn.q_proj.bias": ones(64)})
    with pytest.raises(
        ModelFileError, match=r"'attention_bias' is False, but the model has the tensor model\.layers\.1"
    ):
        estimate(path)
