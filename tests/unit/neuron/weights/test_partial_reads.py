"""Parts of tensors have exactly the values of the same rows and columns of the whole tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from helexa.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.model_file import WHOLE, Part, TensorFile
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight
from neuron.weights.hf_to_gguf import write_model
from neuron.weights.random_blocks import BLOCKS, random_blocks

WriteGguf = Callable[..., Path]
Numbers = NDArray[np.int64]

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 32, 128
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": HYBRID,
    "qwen3_5_moe_text": HYBRID,
}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def model_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(512)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(32)
    if writer.arch == "qwen35":
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(KEY_DIM)
        writer.add_ssm_group_count(KEY_HEADS)
        writer.add_ssm_time_step_rank(HEADS)
        writer.add_ssm_inner_size(HEADS * VALUE_DIM)
    if writer.arch == "qwen3moe":
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(1536)


def tensors_of(weight: Weight) -> list[Tensor]:
    if isinstance(weight, Tensor):
        return [weight.float()]
    scales = [scale.values() for scale in (weight.scale, weight.minimum) if scale is not None]
    return [weight.codes, *scales, weight.dequantize()]


def assert_equal(part: Weight, expected: Weight) -> None:
    assert type(part) is type(expected)
    for ours, theirs in zip(tensors_of(part), tensors_of(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def chosen(weight: Weight, part: Part) -> Weight:
    """Return the part of a weight that has been read as a whole."""
    if part.rows is not None:
        rows = torch.from_numpy(part.rows)
        weight = weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)
    if part.columns is not None:
        weight = weight[..., part.columns] if isinstance(weight, Tensor) else weight.columns(part.columns)
    return weight


def some_rows(count: int) -> list[Numbers]:
    third = count // 3
    ranges = (np.arange(1, 1 + third // 2), np.arange(third, third + 2), np.arange(count - 3, count))
    shuffled = np.random.default_rng(5).permutation(count)[: max(third, 1)]
    return [
        np.arange(third, 2 * third + 1),
        np.arange(0, third + 1),
        np.concatenate(ranges),
        shuffled,
        np.arange(count),
    ]


def assert_parts_equal(checkpoint: Checkpoint, name: str, index: int | None = None) -> None:
    """Compare reads of some rows, of some columns and of both with the whole tensor."""
    whole = checkpoint.read(name, index)
    rows = some_rows(whole.shape[0]) if whole.shape[0] > 8 else [np.arange(whole.shape[0])]
    parts = [Part(numbers) for numbers in rows]
    block = checkpoint.column_block(name)
    blocks = whole.shape[-1] // block if len(whole.shape) == 2 else 1
    if blocks > 1:
        first, last = np.arange(blocks // 2 * block), np.arange(blocks // 2 * block, blocks * block)
        parts += [Part(None, first), Part(None, last), Part(rows[0], last), Part(rows[2 % len(rows)], first)]
    for part in parts:
        read = checkpoint.read(name, index, part)
        assert tuple(read.shape) == part.shape(tuple(whole.shape))
        assert_equal(read, chosen(whole, part))
        if len(read.shape) == 2:
            assert type(checkpoint.on_meta(name, tuple(read.shape))) is type(read)


def stored(kind: str, *shape: int) -> tuple[NDArray[Any], GGMLQuantizationType]:
    elements, nbytes = BLOCK_SIZES[GgmlType[kind]]
    if kind in BLOCKS:
        rows, blocks = int(np.prod(shape[:-1])), shape[-1] // elements
        values = random_blocks(kind, rows, max(blocks, 5))[:, : blocks * nbytes]
        return values.reshape(*shape[:-1], -1), GGMLQuantizationType[kind]
    return np.random.default_rng(3).normal(size=shape).astype(np.float32), GGMLQuantizationType[kind]


@pytest.mark.parametrize("kind", [*BLOCKS, "F32", "F16", "BF16"])
def test_parts_read_from_every_gguf_type_equal_slices_of_the_whole_tensor(kind: str, write_gguf: WriteGguf) -> None:
    tensors = {
        "blk.0.attn_q.weight": stored(kind, 64, 1536),  # interleaved heads
        "blk.0.attn_v.weight": stored(kind, 64, 1536),
    }
    with GgufCheckpoint(write_gguf("llama", tensors, model_keys)) as checkpoint:
        assert_parts_equal(checkpoint, "model.layers.0.self_attn.q_proj.weight")
        assert_parts_equal(checkpoint, "model.layers.0.self_attn.v_proj.weight")
    experts = {"blk.0.ffn_down_exps.weight": stored(kind, 3, 32, 1536)}
    with GgufCheckpoint(write_gguf("qwen3moe", experts, model_keys)) as checkpoint:
        for expert in range(3):
            assert_parts_equal(checkpoint, "model.layers.0.mlp.experts.down_proj.weight", expert)


@pytest.mark.parametrize("kind", [*BLOCKS, "F32", "F16", "BF16"])
def test_parts_read_from_round_robin_value_heads_equal_slices_of_the_whole_tensor(
    kind: str, write_gguf: WriteGguf
) -> None:
    """Blocks of some types span several heads, so that the columns are dequantized before they are reordered."""
    mixed = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    tensors = {
        "blk.0.attn_qkv.weight": stored(kind, mixed, 256),
        "blk.0.ssm_out.weight": stored(kind, 32, HEADS * VALUE_DIM),
    }
    with GgufCheckpoint(write_gguf("qwen35", tensors, model_keys)) as checkpoint:
        assert_parts_equal(checkpoint, "model.layers.0.linear_attn.in_proj_qkv.weight")
        name = "model.layers.0.linear_attn.out_proj.weight"
        whole = checkpoint.read(name)
        for first in range(0, HEADS * VALUE_DIM, VALUE_DIM):
            heads = Part(None, np.arange(first, first + VALUE_DIM))
            read = checkpoint.read(name, None, heads)
            assert_equal(read, chosen(whole, heads))
            assert type(checkpoint.on_meta(name, tuple(read.shape))) is type(read)


@pytest.mark.parametrize("kind", FAMILIES)
def test_parts_read_from_all_tensors_of_a_family_equal_slices_of_the_whole_tensor(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **SHAPE | FAMILIES[kind])
    torch.manual_seed(1)
    state = {
        name: torch.randn(tensor.shape)
        for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
    }
    with GgufCheckpoint(write_model(tmp_path / "model.gguf", config, state)) as checkpoint:
        for name in checkpoint.names():
            stack = len(checkpoint.shape(name)) == 3 and "conv1d" not in name
            assert_parts_equal(checkpoint, name, 1 if stack else None)


def safetensors(folder: Path, tensors: dict[str, Tensor], quantization: object) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "qwen3"} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_read_from_safetensors_equal_slices_of_the_whole_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"vector": torch.randn(33), "matrix": torch.randn(48, 20), "stack": torch.randn(3, 48, 20)}
    tensors = {"odd": torch.ones(1, dtype=torch.uint8)} | {name: tensor.to(dtype) for name, tensor in tensors.items()}
    with safetensors(tmp_path, tensors, None) as checkpoint:
        assert_parts_equal(checkpoint, "vector")
        assert_parts_equal(checkpoint, "matrix")
        assert_parts_equal(checkpoint, "stack", 2)


@pytest.mark.parametrize("scale", [(), (1,), (70,), (70, 1), (5, 4)])
def test_parts_read_from_fp8_tensors_equal_slices_of_the_whole_tensor(scale: tuple[int, ...], tmp_path: Path) -> None:
    codes = torch.randint(0, 120, (70, 100), dtype=torch.uint8).view(torch.float8_e4m3fn)
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    with safetensors(tmp_path, {"a": codes, "a_scale_inv": torch.rand(scale)}, quantization) as checkpoint:
        assert_parts_equal(checkpoint, "a")
        whole = checkpoint.read("a")
        within_blocks = Part(np.arange(20, 41), np.arange(17, 70))
        assert_equal(checkpoint.read("a", None, within_blocks), chosen(whole, within_blocks))


def test_parts_read_from_stacked_fp8_tensors_equal_slices_of_the_whole_tensor(tmp_path: Path) -> None:
    codes = torch.randint(0, 120, (3, 48, 96), dtype=torch.uint8).view(torch.float8_e4m3fn)
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    with safetensors(tmp_path, {"a": codes, "a_scale_inv": torch.rand(3, 3, 3)}, quantization) as checkpoint:
        assert_parts_equal(checkpoint, "a", 2)


def test_parts_read_from_mxfp4_tensors_equal_slices_of_the_whole_tensor(tmp_path: Path) -> None:
    tensors = {
        "a_blocks": torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8),
        "a_scales": torch.randint(100, 140, (3, 40, 5), dtype=torch.uint8),
    }
    with safetensors(tmp_path, tensors, {"quant_method": "mxfp4"}) as checkpoint:
        assert checkpoint.column_block("a") == 32
        for expert in range(3):
            assert_parts_equal(checkpoint, "a", expert)
        with pytest.raises(ValueError, match="not whole groups of 32"):
            checkpoint.read("a", 0, Part(None, np.arange(16)))


def test_partial_read_of_columns_that_cut_a_quantized_block_is_dequantized(write_gguf: WriteGguf) -> None:
    with GgufCheckpoint(
        write_gguf("llama", {"blk.0.attn_v.weight": stored("Q4_K", 32, 512)}, model_keys)
    ) as checkpoint:
        name = "model.layers.0.self_attn.v_proj.weight"
        part, whole = Part(None, np.arange(40, 300)), checkpoint.read(name)
        read = checkpoint.read(name, None, part)
        assert isinstance(whole, GroupwiseTensor)
        assert isinstance(read, Tensor)
        assert torch.equal(read, whole.dequantize()[:, 40:300])


def test_adjacent_rows_of_a_tensor_file_are_mapped_without_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(240)))
    file = TensorFile(path, 240)
    assert file.read_part(40, (10, 5, 4), WHOLE, "a").tobytes() == bytes(range(40, 240))
    rows = file.read_part(40, (10, 5, 4), Part(np.arange(2, 5)), "a")
    assert rows.tobytes() == bytes(range(80, 140))
    assert rows.base is not None
    assert file.read_part(0, (10, 5, 4), Part(np.arange(0)), "a").size == 0
    file.close()


def test_row_numbers_outside_the_tensor_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(200))
    with pytest.raises(IndexError, match=r"tensor a has 5 rows, not rows 4 to 5"):
        TensorFile(path, 200).read_part(0, (5, 5, 4), Part(np.array([4, 5])), "a")
