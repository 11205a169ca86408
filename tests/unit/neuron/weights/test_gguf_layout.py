"""Quantized tensors whose rows, columns or scales are in another order than in Hugging Face's checkpoints."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight

WriteGguf = Callable[..., Path]

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, HIDDEN = 2, 4, 32, 128, 256
VALUES_PER_KEY = HEADS // KEY_HEADS
EXPERTS, WIDTH = 3, 64


def linear_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(32)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(KEY_DIM)
    writer.add_ssm_group_count(KEY_HEADS)
    writer.add_ssm_time_step_rank(HEADS)
    writer.add_ssm_inner_size(HEADS * VALUE_DIM)


def expert_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(32)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(WIDTH)


def stored(kind: GGMLQuantizationType, *shape: int) -> np.ndarray:
    """Return random blocks of a type with finite scales."""
    generator = np.random.default_rng(3)
    if kind == GGMLQuantizationType.Q4_K:
        blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // 256, 144), dtype=np.uint8)
        blocks[..., :4] = generator.normal(size=(*blocks.shape[:-1], 2)).astype(np.float16).view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)
    if kind == GGMLQuantizationType.NVFP4:
        blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36), dtype=np.uint8)
        blocks[..., :4] &= 0x7F
        return blocks.reshape(*shape[:-1], -1)
    return gguf.quants.quantize(generator.normal(size=shape).astype(np.float32), kind)


def dense(weight: Weight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, GroupwiseTensor) else weight.float()


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K, GGMLQuantizationType.F16])
def test_value_heads_of_quantized_projections_are_reordered(write_gguf: WriteGguf, kind: GGMLQuantizationType) -> None:
    """Compare each head, because a head with the scales of another head would still be finite and plausible."""
    keys = 2 * KEY_HEADS * KEY_DIM
    mixed, out = stored(kind, keys + HEADS * VALUE_DIM, HIDDEN), stored(kind, HIDDEN, HEADS * VALUE_DIM)
    path = write_gguf(
        "qwen35", {"blk.0.attn_qkv.weight": (mixed, kind), "blk.0.ssm_out.weight": (out, kind)}, linear_keys
    )
    rows = torch.from_numpy(gguf.quants.dequantize(mixed, kind).copy())
    columns = torch.from_numpy(gguf.quants.dequantize(out, kind).copy())
    with GgufCheckpoint(path) as checkpoint:
        ours = dense(checkpoint.read("model.layers.0.linear_attn.in_proj_qkv.weight"))
        assert torch.equal(ours[:keys], rows[:keys])
        for key_head in range(KEY_HEADS):
            for value in range(VALUES_PER_KEY):
                stored_at = keys + (value * KEY_HEADS + key_head) * VALUE_DIM
                expected_at = keys + (key_head * VALUES_PER_KEY + value) * VALUE_DIM
                assert torch.equal(ours[expected_at : expected_at + VALUE_DIM], rows[stored_at : stored_at + VALUE_DIM])
        ours = dense(checkpoint.read("model.layers.0.linear_attn.out_proj.weight"))
        for key_head in range(KEY_HEADS):
            for value in range(VALUES_PER_KEY):
                stored_at = (value * KEY_HEADS + key_head) * VALUE_DIM
                expected_at = (key_head * VALUES_PER_KEY + value) * VALUE_DIM
                assert torch.equal(
                    ours[:, expected_at : expected_at + VALUE_DIM], columns[:, stored_at : stored_at + VALUE_DIM]
                )


def test_columns_reordered_by_value_head_stay_quantized_if_heads_consist_of_whole_blocks(write_gguf: WriteGguf) -> None:
    kind = GGMLQuantizationType.Q8_0
    out = {"blk.0.ssm_out.weight": (stored(kind, HIDDEN, HEADS * VALUE_DIM), kind)}
    with GgufCheckpoint(write_gguf("qwen35", out, linear_keys)) as checkpoint:
        assert isinstance(checkpoint.read("model.layers.0.linear_attn.out_proj.weight"), GroupwiseTensor)


@pytest.mark.parametrize(("name", "axis"), [("attn_qkv", "rows"), ("ssm_out", "columns")])
def test_tensor_whose_size_does_not_match_the_value_heads_is_rejected(
    write_gguf: WriteGguf, name: str, axis: str
) -> None:
    path = write_gguf("qwen35", {f"blk.0.{name}.weight": np.zeros((33, 33), np.float32)}, linear_keys)
    with (
        GgufCheckpoint(path) as checkpoint,
        pytest.raises(ModelFileError, match=f"has 33 {axis}, which do not match 4 value heads"),
    ):
        checkpoint.read(checkpoint.names()[0])


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_K])
def test_one_expert_of_a_stacked_gguf_tensor_can_be_read(write_gguf: WriteGguf, kind: GGMLQuantizationType) -> None:
    down = stored(kind, EXPERTS, HIDDEN, 256)
    path = write_gguf("qwen3moe", {"blk.0.ffn_down_exps.weight": (down, kind)}, expert_keys)
    name = "model.layers.0.mlp.experts.down_proj.weight"
    with GgufCheckpoint(path) as checkpoint:
        stacked = dense(checkpoint.read(name))
        assert checkpoint.shape(name) == stacked.shape == (EXPERTS, HIDDEN, 256)
        for expert in range(EXPERTS):
            expected = torch.from_numpy(gguf.quants.dequantize(down[expert], kind).copy())
            assert torch.equal(stacked[expert], expected)
            assert torch.equal(dense(checkpoint.read(name, expert)), expected)
        for missing in (-1, EXPERTS):
            with pytest.raises(ModelFileError, match=rf"blk\.0\.ffn_down_exps\.weight has no matrix {missing}; "):
                checkpoint.read(name, missing)


def test_reading_a_matrix_by_index_from_an_unstacked_tensor_is_an_error(write_gguf: WriteGguf) -> None:
    path = write_gguf("qwen3moe", {"blk.0.ffn_gate_inp.weight": np.zeros((EXPERTS, HIDDEN), np.float32)}, expert_keys)
    with GgufCheckpoint(path) as checkpoint, pytest.raises(ModelFileError, match="has no matrix 0"):
        checkpoint.read("model.layers.0.mlp.gate.weight", 0)


def test_fused_gate_and_up_projections_of_gguf_experts_are_read(write_gguf: WriteGguf) -> None:
    both = np.random.default_rng(4).normal(size=(EXPERTS, 2 * WIDTH, HIDDEN)).astype(np.float32)
    path = write_gguf("qwen3moe", {"blk.0.ffn_gate_up_exps.weight": both}, expert_keys)
    with GgufCheckpoint(path) as checkpoint:
        assert torch.equal(dense(checkpoint.read("model.layers.0.mlp.experts.gate_up_proj")), torch.from_numpy(both))


def test_separate_scale_tensor_multiplies_its_weight(write_gguf: WriteGguf) -> None:
    """NVFP4 files have one scale per tensor or per expert. The scale of activations (`input_scale`) is ignored."""
    kind = GGMLQuantizationType.NVFP4
    head, down = stored(kind, 32, HIDDEN), stored(kind, EXPERTS, HIDDEN, WIDTH)
    factors = np.array([0.5, -3.0, 0.1], np.float32)
    tensors = {
        "output.weight": (head, kind),
        "output.scale": np.array([0.3], np.float32),
        "output.input_scale": np.array([7.0], np.float32),
        "blk.0.ffn_down_exps.weight": (down, kind),
        "blk.0.ffn_down_exps.scale": factors,
    }
    name = "model.layers.0.mlp.experts.down_proj.weight"
    with GgufCheckpoint(write_gguf("qwen3moe", tensors, expert_keys)) as checkpoint:
        assert checkpoint.names() == ["lm_head.weight", name]
        expected = torch.from_numpy(gguf.quants.dequantize(head, kind) * np.float32(0.3))
        assert torch.allclose(dense(checkpoint.read("lm_head.weight")), expected, rtol=1e-6, atol=0)
        expected = torch.from_numpy(gguf.quants.dequantize(down, kind) * factors[:, None, None])
        assert torch.allclose(dense(checkpoint.read(name)), expected, rtol=1e-6, atol=0)
        for expert in range(EXPERTS):
            assert torch.allclose(dense(checkpoint.read(name, expert)), expected[expert], rtol=1e-6, atol=0)


def test_separate_scale_tensor_of_the_wrong_shape_is_rejected(write_gguf: WriteGguf) -> None:
    tensors = {"output.weight": np.ones((32, HIDDEN), np.float32), "output.scale": np.ones(2, np.float32)}
    with (
        GgufCheckpoint(write_gguf("qwen3moe", tensors, expert_keys)) as checkpoint,
        pytest.raises(ModelFileError, match=r"tensor output\.scale is F32 \[2\], expected F32 \[1\]"),
    ):
        checkpoint.read("lm_head.weight")


def test_gguf_types_that_need_more_memory_than_in_the_file_are_logged_once(
    write_gguf: WriteGguf, caplog: pytest.LogCaptureFixture
) -> None:
    small, usual = GGMLQuantizationType.TQ1_0, GGMLQuantizationType.Q4_K
    tensors = {
        "output.weight": (stored(usual, 32, HIDDEN), usual),
        **{f"blk.0.attn_{projection}.weight": (stored(small, HIDDEN, HIDDEN), small) for projection in "qkv"},
    }
    path = write_gguf("qwen3moe", tensors, expert_keys)
    with caplog.at_level("WARNING"), GgufCheckpoint(path):
        pass
    assert caplog.messages == [
        f"weights of a GGUF type take more memory than in the file path={path} type=TQ1_0 times=1.5; "
        "if memory is short, use a file of another type"
    ]
