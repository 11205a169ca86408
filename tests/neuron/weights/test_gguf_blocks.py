import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from helexa.neuron.weights.formats import GroupwiseTensor
from helexa.neuron.weights.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.gguf_blocks import SUPPORTED_TYPES, decode

QUANTISABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # by the reference, which only reads the K types
BLOCKS = [*QUANTISABLE, "Q4_K", "Q5_K", "Q6_K"]
# Where the float16 numbers of a block are, in bytes.
HALVES = {kind: [0, 2] for kind in BLOCKS} | {kind: [0] for kind in ("Q4_0", "Q5_0", "Q8_0")} | {"Q6_K": [208]}


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Every bit pattern of codes, behind finite float16 scales: what a quantiser may never write."""
    generator = np.random.default_rng(7)
    _, size = BLOCK_SIZES[GgmlType[kind]]
    stored = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = generator.normal(0, 3000, (rows, blocks, 1)).astype(np.float16)
        scales[0, :5, 0] = [0.0, -0.0, 6e-8, 65504.0, -65504.0]
        stored[:, :, at : at + 2] = scales.view(np.uint8)
    return stored.reshape(rows, -1)


def decode_random(kind: str, rows: int, blocks: int) -> GroupwiseTensor:
    weights, _ = BLOCK_SIZES[GgmlType[kind]]
    decoded = decode(GgmlType[kind], random_blocks(kind, rows, blocks).reshape(-1), (rows, blocks * weights))
    assert isinstance(decoded, GroupwiseTensor)
    return decoded


@pytest.mark.parametrize("kind", QUANTISABLE)
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
    expected = gguf.quants.dequantize(stored, GGMLQuantizationType[kind])
    assert torch.equal(decode_random(kind, rows=32, blocks=24).dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("kind", "bits", "zero", "has_minimum"),
    [
        ("Q4_0", 4, 8, False),
        ("Q4_1", 4, 0, True),
        ("Q5_0", 5, 16, False),
        ("Q5_1", 5, 0, True),
        ("Q8_0", 8, 128, False),
    ],
)
def test_blocks_of_one_scale_have_the_promised_form(kind: str, bits: int, zero: int, has_minimum: bool) -> None:
    decoded = decode_random(kind, rows=32, blocks=24)
    assert (decoded.bits, decoded.zero, decoded.group_size) == (bits, zero, 32)
    assert_codes(decoded, (32, 768))
    assert (decoded.minimum is not None) == has_minimum
    for number in (decoded.scale, decoded.minimum):
        if number is not None:
            assert (number.unit.dtype, number.unit.shape, number.codes) == (torch.float16, (32, 24), None)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_k_blocks_with_minima_have_the_promised_form(kind: str) -> None:
    decoded = decode_random(kind, rows=32, blocks=24)
    assert (decoded.bits, decoded.zero, decoded.group_size) == ({"Q4_K": 4, "Q5_K": 5}[kind], 0, 32)
    assert_codes(decoded, (32, 24 * 256))
    assert decoded.minimum is not None
    for number in (decoded.scale, decoded.minimum):
        assert (number.unit.dtype, number.unit.shape) == (torch.float16, (32, 24))
        assert number.codes is not None
        assert (number.codes.dtype, number.codes.shape) == (torch.uint8, (32, 24 * 8))
        assert number.codes.is_contiguous()
        assert (int(number.codes.min()), int(number.codes.max())) == (0, 63)


def test_k_blocks_of_signed_scales_have_the_promised_form() -> None:
    decoded = decode_random("Q6_K", rows=32, blocks=24)
    assert (decoded.bits, decoded.zero, decoded.group_size, decoded.minimum) == (6, 32, 16, None)
    assert_codes(decoded, (32, 24 * 256))
    assert (decoded.scale.unit.dtype, decoded.scale.unit.shape) == (torch.float16, (32, 24))
    assert decoded.scale.codes is not None
    assert (decoded.scale.codes.dtype, decoded.scale.codes.shape) == (torch.int8, (32, 24 * 16))
    assert decoded.scale.codes.is_contiguous()
    assert (int(decoded.scale.codes.min()), int(decoded.scale.codes.max())) == (-128, 127)


def assert_codes(decoded: GroupwiseTensor, shape: tuple[int, int]) -> None:
    assert decoded.shape == decoded.codes.shape == shape
    assert decoded.codes.dtype == torch.uint8
    assert decoded.codes.is_contiguous()
    assert (int(decoded.codes.min()), int(decoded.codes.max())) == (0, 2**decoded.bits - 1)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types_equal_the_reference(kind: str) -> None:
    weights = np.random.default_rng(2).normal(size=(6, 10)).astype(np.float32)
    stored = gguf.quants.quantize(weights, GGMLQuantizationType[kind])
    decoded = decode(GgmlType[kind], stored.view(np.uint8).reshape(-1).copy(), weights.shape)
    assert isinstance(decoded, torch.Tensor)
    assert decoded.dtype == {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert torch.equal(decoded.float(), torch.from_numpy(gguf.quants.dequantize(stored, GGMLQuantizationType[kind])))


def test_dequantize_rounds_once_to_the_asked_type() -> None:
    decoded = decode_random("Q4_1", rows=4, blocks=8)
    assert torch.equal(decoded.dequantize(torch.bfloat16), decoded.dequantize().to(torch.bfloat16))


def test_the_type_table_agrees_with_the_reference() -> None:
    reference = {kind.name: (kind.value, gguf.GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    ours = {kind.name: (kind.value, BLOCK_SIZES[kind]) for kind in BLOCK_SIZES}
    assert {name: ours.get(name) for name in reference} == reference


def test_supported_types() -> None:
    assert {kind.name for kind in SUPPORTED_TYPES} == {"F32", "F16", "BF16", *BLOCKS}
