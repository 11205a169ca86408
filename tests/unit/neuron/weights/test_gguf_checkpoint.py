from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight

WriteGguf = Callable[..., Path]

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY = 64, 4, 2, 96, 50
HEAD_DIM = HIDDEN // HEADS


def dense(weight: Weight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, GroupwiseTensor) else weight.float()


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the row order that converters use for q and k of the llama architecture: halves of a head become pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def describe(architecture: str) -> Callable[[gguf.GGUFWriter], None]:
    def keys(writer: gguf.GGUFWriter) -> None:
        assert writer.arch == architecture
        writer.add_block_count(1)
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)

    return keys


def tensors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(11)

    def normal(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    return {
        "token_embd.weight": normal(VOCABULARY, HIDDEN),
        "output_norm.weight": normal(HIDDEN),
        "blk.0.attn_norm.weight": normal(HIDDEN),
        "blk.0.attn_q.weight": normal(HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": normal(HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": normal(HIDDEN),
        "blk.0.ffn_gate.weight": normal(FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up.weight": normal(FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down.weight": normal(HIDDEN, FEED_FORWARD),
    }


NAMES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
]


def test_configuration_from_a_real_gguf_file_has_hugging_face_keys(
    smollm2_gguf: Path, smollm2_reference: gguf.GGUFReader
) -> None:
    with GgufCheckpoint(smollm2_gguf) as checkpoint:
        assert checkpoint.config == {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "vocab_size": 49152,
            "rms_norm_eps": pytest.approx(1e-5),
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        assert checkpoint.total_bytes == sum(int(tensor.n_bytes) for tensor in smollm2_reference.tensors)


@pytest.mark.parametrize("layer", [0, 29])
def test_layer_of_a_real_gguf_file_equals_transformers(
    smollm2_reference: gguf.GGUFReader, write_gguf: WriteGguf, layer: int
) -> None:
    """All tensors are equal, including the row order of q and k, for which transformers undoes the permutation itself.

    The test copies one layer into its own file, because transformers takes a long time to read the full file.
    """

    def keys(writer: gguf.GGUFWriter) -> None:
        for key, field in smollm2_reference.fields.items():
            if key.startswith("llama."):
                writer.add_key_value(key, 1 if key == "llama.block_count" else field.contents(), field.types[0])

    stored = {
        tensor.name.replace(f"blk.{layer}.", "blk.0."): (tensor.data, tensor.tensor_type)
        for tensor in smollm2_reference.tensors
        if tensor.name.startswith((f"blk.{layer}.", "output_norm."))
    }
    stored["token_embd.weight"] = (np.zeros((49152, 576), np.float16), GGMLQuantizationType.F16)
    path = write_gguf("llama", stored, keys)
    expected = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).state_dict()
    with GgufCheckpoint(path) as checkpoint:
        assert set(checkpoint.names()) == set(expected) - {"lm_head.weight"}
        for name in checkpoint.names():
            assert torch.equal(dense(checkpoint.read(name)), expected[name].float()), name


@pytest.mark.parametrize("name", ["token_embd", "blk.0.ffn_down", "blk.17.attn_v", "blk.29.ffn_norm", "output_norm"])
def test_tensors_of_a_real_gguf_file_equal_the_gguf_package(
    smollm2_gguf: Path, smollm2_reference: gguf.GGUFReader, name: str
) -> None:
    (tensor,) = [tensor for tensor in smollm2_reference.tensors if tensor.name == f"{name}.weight"]
    translated = {
        "token_embd": "model.embed_tokens.weight",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj.weight",
        "blk.17.attn_v": "model.layers.17.self_attn.v_proj.weight",
        "blk.29.ffn_norm": "model.layers.29.post_attention_layernorm.weight",
        "output_norm": "model.norm.weight",
    }[name]
    with GgufCheckpoint(smollm2_gguf) as checkpoint:
        weight = dense(checkpoint.read(translated))
    assert np.array_equal(weight.numpy(), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_tensors_of_a_real_gguf_file_keep_their_quantized_format(smollm2_gguf: Path) -> None:
    with GgufCheckpoint(smollm2_gguf) as checkpoint:
        query = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
        embedding = checkpoint.read("model.embed_tokens.weight")
        norm = checkpoint.read("model.norm.weight")
    assert isinstance(query, GroupwiseTensor)
    assert (query.bits, query.group_size, query.codes.is_contiguous()) == (4, 32, True)
    assert isinstance(embedding, GroupwiseTensor)
    assert (embedding.bits, embedding.shape) == (8, (49152, 576))
    assert isinstance(norm, torch.Tensor)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_llama_rows_permuted_in_gguf_are_reordered_and_names_translated(write_gguf: WriteGguf, kind: str) -> None:
    original = tensors() | {
        "output.weight": np.ones((VOCABULARY, HIDDEN), np.float32),
        "blk.0.attn_q.bias": np.arange(HEADS * HEAD_DIM, dtype=np.float32),
        "blk.0.attn_k.bias": np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32),
        "rope_freqs.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32),
    }
    stored: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for name, values in original.items():
        permuted = (
            interleave(values, HEADS if "attn_q." in name else KV_HEADS)
            if "attn_q." in name or "attn_k." in name
            else values
        )
        if values.ndim == 2:
            quantized = GGMLQuantizationType[kind]
            stored[name] = (permuted, quantized)
            expected[name] = gguf.quants.dequantize(gguf.quants.quantize(values, quantized), quantized)
        else:
            stored[name], expected[name] = permuted, values
    path = write_gguf("llama", stored, describe("llama"))
    translated = [
        *NAMES,
        "lm_head.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_proj.bias",
        "rope_freqs.weight",
    ]
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.names() == translated
        assert checkpoint.config["tie_word_embeddings"] is False
        assert checkpoint.config["attention_bias"] is True
        for name, values in zip(translated, expected.values(), strict=True):
            assert checkpoint.shape(name) == values.shape
            assert torch.equal(dense(checkpoint.read(name)), torch.from_numpy(values)), name


def test_scales_of_k_types_are_reordered_with_their_rows(write_gguf: WriteGguf) -> None:
    """Q4_K has two levels of scales. A row with the scales of another row would still be finite and plausible."""
    generator = np.random.default_rng(5)
    stored = generator.integers(0, 256, (HEADS * HEAD_DIM, 144), dtype=np.uint8)
    stored[:, :4] = generator.normal(size=(len(stored), 2)).astype(np.float16).view(np.uint8)
    kind = GGMLQuantizationType.Q4_K
    query = tensors() | {"blk.0.attn_q.weight": (interleave(stored, HEADS), kind)}
    with GgufCheckpoint(write_gguf("llama", query, describe("llama"))) as checkpoint:
        decoded = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(dense(decoded), torch.from_numpy(gguf.quants.dequantize(stored, kind)))


def test_rows_of_qwen2_keep_their_order_and_bias_names_are_translated(write_gguf: WriteGguf) -> None:
    biases = {
        "blk.0.attn_q.bias": np.arange(HEADS * HEAD_DIM, dtype=np.float32),
        "blk.0.attn_k.bias": np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32),
        "blk.0.attn_v.bias": -np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32),
    }
    original = tensors() | biases

    def keys(writer: gguf.GGUFWriter) -> None:
        describe("qwen2")(writer)
        writer.add_rope_freq_base(1e6)

    with GgufCheckpoint(write_gguf("qwen2", original, keys)) as checkpoint:
        assert checkpoint.config["model_type"] == "qwen2"
        assert checkpoint.config["rope_parameters"]["rope_theta"] == 1e6
        assert checkpoint.config["tie_word_embeddings"] is True
        assert checkpoint.config["attention_bias"] is True
        for projection in "qkv":
            for kind in ("weight", "bias"):
                read = dense(checkpoint.read(f"model.layers.0.self_attn.{projection}_proj.{kind}"))
                assert torch.equal(read, torch.from_numpy(original[f"blk.0.attn_{projection}.{kind}"]))


def test_rows_of_qwen3_keep_their_order_and_norm_names_are_translated(write_gguf: WriteGguf) -> None:
    original = tensors() | {
        "blk.0.attn_q_norm.weight": np.arange(HEAD_DIM, dtype=np.float32),
        "blk.0.attn_k_norm.weight": -np.arange(HEAD_DIM, dtype=np.float32),
        "blk.0.surprise.weight": np.ones(3, np.float32),
    }

    def keys(writer: gguf.GGUFWriter) -> None:
        describe("qwen3")(writer)
        writer.add_key_length(32)
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)
        writer.add_rope_scaling_yarn_beta_fast(16.0)

    with GgufCheckpoint(write_gguf("qwen3", original, keys)) as checkpoint:
        assert checkpoint.config["model_type"] == "qwen3"
        assert checkpoint.config["head_dim"] == 32
        assert checkpoint.config["rope_parameters"] == {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "partial_rotary_factor": 1.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "beta_fast": 16.0,
        }
        assert checkpoint.stored_name("blk.0.surprise.weight") == "blk.0.surprise.weight"
        for name, source in {
            "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
            "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
            "model.layers.0.self_attn.q_norm.weight": "blk.0.attn_q_norm.weight",
            "model.layers.0.self_attn.k_norm.weight": "blk.0.attn_k_norm.weight",
        }.items():
            assert torch.equal(dense(checkpoint.read(name)), torch.from_numpy(original[source]))


def test_unknown_architecture_is_named_in_the_error(write_gguf: WriteGguf) -> None:
    with pytest.raises(
        ModelFileError,
        match=r"^model\.gguf: unsupported architecture 'mamba'; supported: llama, .*qwen35moe, .*gpt-oss; use ",
    ):
        GgufCheckpoint(write_gguf("mamba", tensors(), describe("mamba")))


def test_unsupported_gguf_type_is_rejected_when_the_file_is_opened(write_gguf: WriteGguf, tmp_path: Path) -> None:
    path = write_gguf("llama", tensors() | {"blk.0.attn_q.weight": np.zeros((64, 256), np.float32)}, describe("llama"))
    stored = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    kind = stored.index(name) + len(name) + 4 + 16
    path.write_bytes(stored[:kind] + bytes([9, 0, 0, 0]) + stored[kind + 4 :])
    with pytest.raises(
        ModelFileError,
        match=r"^model\.gguf: unsupported tensor type Q8_1 in blk\.0\.attn_q\.weight; load ",
    ):
        GgufCheckpoint(path)


def test_error_for_a_missing_gguf_tensor_names_the_tensor(write_gguf: WriteGguf) -> None:
    with GgufCheckpoint(write_gguf("llama", tensors(), describe("llama"))) as checkpoint:
        for method in (checkpoint.read, checkpoint.shape):
            with pytest.raises(ModelFileError, match=r"^model\.gguf: the file has no tensor lm_head\.weight; "):
                method("lm_head.weight")


def test_gguf_file_with_a_quantized_vector_is_rejected(write_gguf: WriteGguf) -> None:
    vector = (np.ones(HIDDEN, np.float32), GGMLQuantizationType.Q8_0)
    with pytest.raises(ModelFileError, match=r"tensor blk\.0\.attn_q\.weight is a vector of type Q8_0"):
        GgufCheckpoint(write_gguf("llama", tensors() | {"blk.0.attn_q.weight": vector}, describe("llama")))


def test_gguf_checkpoint_with_a_flipped_header_byte_causes_no_crash(write_gguf: WriteGguf, tmp_path: Path) -> None:
    stored = {
        name: (values, GGMLQuantizationType.Q4_1) if values.ndim == 2 else values for name, values in tensors().items()
    }
    path = write_gguf("llama", stored, describe("llama"))
    original = path.read_bytes()
    start = min(int(tensor.data_offset) for tensor in gguf.GGUFReader(path).tensors)
    damaged = tmp_path / "damaged.gguf"
    rejected = 0
    for position in range(24, start):
        for mask in (0x01, 0x80):
            damaged.write_bytes(original[:position] + bytes([original[position] ^ mask]) + original[position + 1 :])
            try:
                with GgufCheckpoint(damaged) as checkpoint:
                    for name in checkpoint.names():
                        assert dense(checkpoint.read(name)).shape == checkpoint.shape(name)
            except ModelFileError as error:
                rejected += 1
                assert str(error).isprintable()
    assert rejected > start // 2


def test_projection_whose_rows_do_not_divide_into_the_heads_is_rejected(write_gguf: WriteGguf) -> None:
    odd = tensors() | {"blk.0.attn_k.weight": np.zeros((30, HIDDEN), np.float32)}
    with (
        GgufCheckpoint(write_gguf("llama", odd, describe("llama"))) as checkpoint,
        pytest.raises(ModelFileError, match=r"k_proj\.weight has 30 rows, which do not divide into 2 heads"),
    ):
        checkpoint.read("model.layers.0.self_attn.k_proj.weight")


@pytest.mark.parametrize(
    ("key", "add", "problem"),
    [
        ("llama.block_count", lambda writer, key: None, "is missing"),
        ("llama.block_count", lambda writer, key: writer.add_string(key, "2"), "is not one whole number"),
        ("llama.block_count", lambda writer, key: writer.add_uint32(key, 0), "is not one whole number"),
        ("llama.block_count", lambda writer, key: writer.add_uint64(key, 2**40), "is not one whole number"),
        ("llama.block_count", lambda writer, key: writer.add_array(key, [1, 2]), "is not one whole number"),
        ("llama.block_count", lambda writer, key: writer.add_array(key, [[1], [2]]), "is not one whole number"),
        ("llama.block_count", lambda writer, key: writer.add_uint32(key, 12), "11 tensors"),
        ("llama.attention.head_count", lambda writer, key: writer.add_uint32(key, 65), "larger than embedding_length"),
        (
            "llama.attention.layer_norm_rms_epsilon",
            lambda writer, key: writer.add_float32(key, float("nan")),
            "positive",
        ),
        ("llama.rope.freq_base", lambda writer, key: writer.add_string(key, "much"), "is not a positive number"),
        ("llama.rope.scaling.type", lambda writer, key: writer.add_uint32(key, 1), "is not a short printable text"),
    ],
)
def test_error_for_an_invalid_gguf_key_names_the_key(
    write_gguf: WriteGguf, key: str, add: Callable[[gguf.GGUFWriter, str], None], problem: str
) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        describe("llama")(writer)
        for shard in writer.kv_data:
            shard.pop(key, None)
        add(writer, key)

    with pytest.raises(ModelFileError, match=rf"^model\.gguf: key {key} .*{problem}"):
        GgufCheckpoint(write_gguf("llama", tensors(), keys))


def test_per_layer_gguf_list_of_equal_numbers_is_read_as_one_number(write_gguf: WriteGguf) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        describe("llama")(writer)
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        writer.add_array("llama.attention.head_count_kv", [2, 2, 2])

    with GgufCheckpoint(write_gguf("llama", tensors(), keys)) as checkpoint:
        assert checkpoint.config["num_key_value_heads"] == 2
