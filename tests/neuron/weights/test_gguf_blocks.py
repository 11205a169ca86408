import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from helexa.neuron.weights.formats import GroupwiseTensor
from helexa.neuron.weights.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.gguf_blocks import SUPPORTED_TYPES, decode

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q5_1": 8, "Q8_0": 8}
LARGEST_CODE = {"Q4_0": 15, "Q4_1": 15, "Q5_0": 31, "Q5_1": 31, "Q8_0": 255}


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Every bit pattern of codes, behind finite float16 scales: what a quantiser may never write."""
    generator = np.random.default_rng(7)
    _, size = BLOCK_SIZES[GgmlType[kind]]
    stored = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    halves = 2 if kind.endswith("_1") else 1
    scales = generator.normal(0, 3000, (rows, blocks, halves)).astype(np.float16)
    stored[:, :, : 2 * halves] = scales.view(np.uint8).reshape(rows, blocks, 2 * halves)
    return stored.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_equal_the_reference_bit_for_bit_on_quantised_weights(kind: str) -> None:
    weights = np.random.default_rng(1).normal(0, 0.02, (48, 96)).astype(np.float32)
    stored = gguf.quants.quantize(weights, GGMLQuantizationType[kind])
    decoded = decode(GgmlType[kind], stored.reshape(-1).copy(), weights.shape)
    assert isinstance(decoded, GroupwiseTensor)
    expected = gguf.quants.dequantize(stored, GGMLQuantizationType[kind])
    assert torch.equal(decoded.dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_equal_the_reference_bit_for_bit_on_any_bytes(kind: str) -> None:
    stored = random_blocks(kind, rows=32, blocks=24)
    decoded = decode(GgmlType[kind], stored.reshape(-1).copy(), (32, 24 * 32))
    assert isinstance(decoded, GroupwiseTensor)
    expected = gguf.quants.dequantize(stored, GGMLQuantizationType[kind])
    assert torch.equal(decoded.dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_and_groups_have_the_promised_form(kind: str) -> None:
    decoded = decode(GgmlType[kind], random_blocks(kind, rows=32, blocks=24).reshape(-1), (32, 24 * 32))
    assert isinstance(decoded, GroupwiseTensor)
    assert decoded.shape == decoded.codes.shape == (32, 768)
    assert decoded.scale.shape == decoded.minimum.shape == (32, 24)
    assert decoded.codes.dtype == torch.uint8
    assert decoded.scale.dtype == decoded.minimum.dtype == torch.float32
    assert (decoded.bits, decoded.group_size) == (BITS[kind], 32)
    assert (int(decoded.codes.min()), int(decoded.codes.max())) == (0, LARGEST_CODE[kind])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types_equal_the_reference(kind: str) -> None:
    weights = np.random.default_rng(2).normal(size=(6, 10)).astype(np.float32)
    stored = gguf.quants.quantize(weights, GGMLQuantizationType[kind])
    decoded = decode(GgmlType[kind], stored.view(np.uint8).reshape(-1).copy(), weights.shape)
    assert isinstance(decoded, torch.Tensor)
    assert decoded.dtype == {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert torch.equal(decoded.float(), torch.from_numpy(gguf.quants.dequantize(stored, GGMLQuantizationType[kind])))


def test_dequantize_rounds_once_to_the_asked_type() -> None:
    decoded = decode(GgmlType.Q4_1, random_blocks("Q4_1", rows=4, blocks=2).reshape(-1), (4, 64))
    assert isinstance(decoded, GroupwiseTensor)
    assert torch.equal(decoded.dequantize(torch.bfloat16), decoded.dequantize().to(torch.bfloat16))


def test_the_type_table_agrees_with_the_reference() -> None:
    reference = {kind.name: (kind.value, gguf.GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    ours = {kind.name: (kind.value, BLOCK_SIZES[kind]) for kind in BLOCK_SIZES}
    assert {name: ours.get(name) for name in reference} == reference


def test_supported_types() -> None:
    assert {kind.name for kind in SUPPORTED_TYPES} == {"F32", "F16", "BF16", *BLOCKS}
