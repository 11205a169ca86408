"""fp8 and MXFP4 checkpoints, compared with transformers; other quantization methods are rejected by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}
NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def checkpoint_of(folder: Path, tensors: dict[str, Tensor], quantization: object) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "qwen3", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def fp8(*shape: int) -> Tensor:
    """Return random finite fp8 values."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN codes
    return codes.view(torch.float8_e4m3fn)


def by_transformers(weight: Tensor, scale: Tensor) -> Tensor:
    return Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scale, torch.float32)


@pytest.mark.parametrize("name", [NAME, "model.layers.0.mlp.experts.gate_up_proj"])
def test_fp8_with_block_scales_equals_transformers(name: str, tmp_path: Path) -> None:
    weight, scale = fp8(64, 96), torch.rand(4, 3)
    tensors = {name: weight, f"{name}_scale_inv": scale, "model.norm.weight": torch.ones(3)}
    with checkpoint_of(tmp_path, tensors, FP8) as checkpoint:
        assert torch.equal(checkpoint.read(name), by_transformers(weight, scale))
        assert set(checkpoint.names()) == {name, "model.norm.weight"}
        assert checkpoint.shape(name) == (64, 96)
        assert "quantization_config" not in checkpoint.config
        assert checkpoint.total_bytes == 64 * 96 + 12 * 4 + 3 * 4


def test_stacked_fp8_experts_can_be_read_one_by_one(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    weight, scale = fp8(3, 32, 64), torch.rand(3, 2, 2)
    with checkpoint_of(tmp_path, {name: weight, f"{name}_scale_inv": scale}, FP8) as checkpoint:
        for expert in range(3):
            assert torch.equal(checkpoint.read(name, expert), by_transformers(weight[expert], scale[expert]))
        assert torch.equal(checkpoint.read(name), torch.stack([checkpoint.read(name, e) for e in range(3)]))
        with pytest.raises(ModelFileError, match="has no part 3"):
            checkpoint.read(name, 3)


def test_fp8_matrix_that_ends_within_a_block_is_dequantized_exactly(tmp_path: Path) -> None:
    weight, scale = fp8(40, 70), torch.rand(3, 3)
    expected = (
        torch.cat([weight.float(), torch.zeros(8, 70)]).view(3, 16, 70) * scale.repeat_interleave(32, 1)[:, None, :70]
    )
    with checkpoint_of(tmp_path, {NAME: weight, f"{NAME}_scale_inv": scale}, FP8) as checkpoint:
        assert torch.equal(checkpoint.read(NAME), expected.view(48, 70)[:40])


@pytest.mark.parametrize("shape", [(), (1,), (64,), (64, 1), (1, 1)])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_fp8_with_one_scale_per_tensor_or_per_row_is_dequantized_exactly(
    suffix: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    weight, scale = fp8(64, 96), torch.rand(shape)
    with checkpoint_of(tmp_path, {NAME: weight, f"{NAME}{suffix}": scale}, {"quant_method": "fp8"}) as checkpoint:
        assert torch.equal(checkpoint.read(NAME), weight.float() * scale.view(-1, 1))


@pytest.mark.parametrize("kind", [torch.float8_e8m0fnu, torch.uint8])
def test_fp8_scales_stored_as_exponents_are_read(kind: torch.dtype, tmp_path: Path) -> None:
    weight, exponents = fp8(64, 96), torch.randint(100, 140, (4, 3), dtype=torch.uint8)
    tensors = {NAME: weight, f"{NAME}_scale_inv": exponents.view(kind)}
    with checkpoint_of(tmp_path, tensors, FP8) as checkpoint:
        expected = by_transformers(weight, (exponents.float() - 127).exp2())
        assert torch.equal(checkpoint.read(NAME), expected)


def test_fp8_checkpoint_may_have_unquantized_modules(tmp_path: Path) -> None:
    head = torch.randn(8, 4).bfloat16()
    tensors = {NAME: fp8(64, 96), f"{NAME}_scale_inv": torch.rand(4, 3), "lm_head.weight": head}
    tensors["model.embed_tokens.weight"] = torch.ones(8, 4)
    with checkpoint_of(tmp_path, tensors, FP8) as checkpoint:
        assert torch.equal(checkpoint.read("lm_head.weight"), head)


@pytest.mark.parametrize(
    ("tensors", "settings", "problem"),
    [
        ({NAME: fp8(64, 96)}, {}, f"{NAME} is in fp8, but {NAME}_scale_inv is missing"),
        ({NAME: fp8(64, 96), f"{NAME}_scale_inv": torch.rand(3, 3)}, {}, "does not fit"),
        ({NAME: fp8(64, 96), f"{NAME}_scale_inv": torch.rand(1, 4, 3)}, {}, "does not fit"),
        ({}, {"weight_block_size": [16]}, "expected two sizes such as"),
        ({}, {"weight_block_size": [16, 0]}, "expected two sizes such as"),
        ({}, {"weight_block_size": "16"}, "expected two sizes such as"),
        ({}, {"weight_block_size": [1 << 70, 1]}, "expected two sizes such as"),
    ],
)
def test_invalid_fp8_tensors_are_rejected(
    tensors: dict[str, Tensor], settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=problem.replace(".", r"\.")):
        checkpoint_of(tmp_path, tensors | {"model.norm.weight": torch.ones(2)}, FP8 | settings)


def test_mxfp4_codes_are_kept_and_values_equal_transformers(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (3, 6, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 6, 4), dtype=torch.uint8)
    scales[0, 0, :2] = torch.tensor([0, 254])
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3, 6)}
    with checkpoint_of(tmp_path, tensors, {"quant_method": "mxfp4"}) as checkpoint:
        assert set(checkpoint.names()) == {name, f"{name}_bias"}
        assert checkpoint.shape(name) == (3, 6, 128)
        for expert in range(3):
            matrix = checkpoint.read(name, expert)
            assert isinstance(matrix, GroupwiseTensor)
            assert torch.equal(matrix.dequantize(), expected[expert])
        with pytest.raises(ModelFileError, match="one matrix at a time"):
            checkpoint.read(name)


@pytest.mark.parametrize(
    "tensors",
    [
        {"x_blocks": torch.zeros(2, 3, 16, dtype=torch.uint8)},
        {"x_blocks": torch.zeros(2, 3, 16, dtype=torch.uint8), "x_scales": torch.zeros(2, 4, dtype=torch.uint8)},
        {"x_blocks": torch.zeros(2, 3, 8, dtype=torch.uint8), "x_scales": torch.zeros(2, 3, dtype=torch.uint8)},
        {"x_blocks": torch.zeros(3, 16, dtype=torch.uint8), "x_scales": torch.zeros(3, dtype=torch.uint8)},
        {"x_blocks": torch.zeros(2, 3, 16, dtype=torch.int8), "x_scales": torch.zeros(2, 3, dtype=torch.uint8)},
    ],
)
def test_invalid_mxfp4_tensors_are_rejected(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="MXFP4"):
        checkpoint_of(tmp_path, tensors, {"quant_method": "mxfp4"})


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
def test_unsupported_quantization_method_is_named_in_the_error(method: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"unsupported quant_method '{method}' .*GGUF"):
        checkpoint_of(tmp_path, {"a": torch.ones(2)}, {"quant_method": method})


@pytest.mark.parametrize("quantization", [3, [], {}, {"quant_method": ["fp8"]}])
def test_malformed_quantization_config_is_rejected(quantization: object, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="'quantization_config'"):
        checkpoint_of(tmp_path, {"a": torch.ones(2)}, quantization)
