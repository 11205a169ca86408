import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from helexa.neuron.weights.gguf.blocks import SUPPORTED_TYPES, decode, growth
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor
from neuron.weights.random_blocks import BLOCKS, random_blocks

REFERENCE = [kind for kind in BLOCKS if kind not in ("Q8_K", "Q1_0")]  # the reference cannot dequantize these two types
QUANTIZABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]  # the reference can write these


def decode_random(kind: str, rows: int, blocks: int) -> GroupwiseTensor:
    weights, _ = BLOCK_SIZES[GgmlType[kind]]
    decoded = decode(GgmlType[kind], random_blocks(kind, rows, blocks).reshape(-1), (rows, blocks * weights))
    assert isinstance(decoded, GroupwiseTensor)
    return decoded


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_decoded_gguf_weights_equal_the_gguf_package_bit_for_bit(kind: str) -> None:
    weights = np.random.default_rng(1).normal(0, 0.02, (48, 512)).astype(np.float32)
    weights[3] = 0
    stored = gguf.quants.quantize(weights, GGMLQuantizationType[kind])
    decoded = decode(GgmlType[kind], stored.reshape(-1).copy(), weights.shape)
    assert isinstance(decoded, GroupwiseTensor)
    expected = gguf.quants.dequantize(stored, GGMLQuantizationType[kind])
    assert torch.equal(decoded.dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", REFERENCE)
def test_decoded_random_gguf_blocks_equal_the_gguf_package_bit_for_bit(kind: str) -> None:
    stored = random_blocks(kind, rows=32, blocks=24)
    with np.errstate(over="ignore"):  # the largest MXFP4 scale overflows in some blocks
        expected = gguf.quants.dequantize(stored, GGMLQuantizationType[kind])
    assert torch.equal(decode_random(kind, rows=32, blocks=24).dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", BLOCKS)
def test_single_gguf_block_decodes_to_the_same_weights_as_within_a_row(kind: str) -> None:
    stored, weights = random_blocks(kind, rows=2, blocks=5), BLOCK_SIZES[GgmlType[kind]][0]
    together = decode(GgmlType[kind], stored[0].copy(), (1, 5 * weights))
    single = decode(GgmlType[kind], stored[0][: len(stored[0]) // 5].copy(), (1, weights))
    assert isinstance(together, GroupwiseTensor)
    assert isinstance(single, GroupwiseTensor)
    assert torch.equal(single.dequantize(), together.dequantize()[:, :weights])


def test_q8_k_block_is_a_float32_scale_and_signed_bytes() -> None:
    stored = random_blocks("Q8_K", rows=32, blocks=24).reshape(-1, 292)
    expected = stored[:, :4].view(np.float32) * stored[:, 4:260].view(np.int8).astype(np.float32)
    decoded = decode_random("Q8_K", rows=32, blocks=24)
    assert (decoded.bits, decoded.zero, decoded.group_size, decoded.scale.codes) == (8, 128, 32, None)
    assert torch.equal(decoded.dequantize(), torch.from_numpy(expected.reshape(32, -1)))


def test_q1_0_stores_one_sign_bit_per_weight() -> None:
    stored = random_blocks("Q1_0", rows=32, blocks=24).reshape(-1, 18)
    signs = np.unpackbits(stored[:, 2:], axis=-1, bitorder="little").astype(np.float32) * 2 - 1
    expected = stored[:, :2].copy().view(np.float16).astype(np.float32) * signs
    assert torch.equal(
        decode_random("Q1_0", rows=32, blocks=24).dequantize(), torch.from_numpy(expected.reshape(32, -1))
    )


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
def test_decoded_gguf_blocks_with_one_scale_have_the_documented_bits_groups_and_scales(
    kind: str, bits: int, zero: int, has_minimum: bool
) -> None:
    decoded = decode_random(kind, rows=32, blocks=24)
    assert (decoded.bits, decoded.zero, decoded.group_size) == (bits, zero, 32)
    assert_codes(decoded, (32, 768))
    assert (decoded.minimum is not None) == has_minimum
    for number in (decoded.scale, decoded.minimum):
        if number is not None:
            assert (number.unit.dtype, number.unit.shape, number.codes) == (torch.float16, (32, 24), None)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_decoded_q4_k_and_q5_k_weights_have_the_documented_bits_groups_and_scales(kind: str) -> None:
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


def test_decoded_q6_k_weights_have_the_documented_bits_groups_and_scales() -> None:
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


TABLE_LAYOUTS = {
    # group size, dtype of the unit, units per 256 weights, scale codes per 256 weights, dtype of the scale codes
    "IQ1_S": (32, torch.float32, 1, 8, torch.uint8),
    "IQ1_M": (16, torch.float32, 1, 16, torch.uint8),
    "IQ2_XXS": (32, torch.float32, 1, 8, torch.uint8),
    "IQ2_XS": (16, torch.float32, 1, 16, torch.uint8),
    "IQ2_S": (16, torch.float32, 1, 16, torch.uint8),
    "IQ3_XXS": (32, torch.float32, 1, 8, torch.uint8),
    "IQ3_S": (32, torch.float16, 1, 8, torch.uint8),
    "IQ4_NL": (32, torch.float16, 8, None, None),
    "IQ4_XS": (32, torch.float16, 1, 8, torch.int8),
    "MXFP4": (32, torch.float32, 8, None, None),
    "NVFP4": (16, torch.float16, 16, None, None),
}


@pytest.mark.parametrize("kind", TABLE_LAYOUTS)
def test_decoded_gguf_types_with_a_table_of_values_have_the_documented_groups_and_scales(kind: str) -> None:
    group_size, unit_type, units, small, small_type = TABLE_LAYOUTS[kind]
    elements, _ = BLOCK_SIZES[GgmlType[kind]]
    decoded = decode_random(kind, rows=32, blocks=24)
    stretches = 24 * elements // 256
    assert (decoded.bits, decoded.zero, decoded.group_size, decoded.minimum) == (4, 0, group_size, None)
    assert decoded.table is not None
    assert (decoded.table.dtype, decoded.table.shape) == (torch.int8, (16,))
    assert decoded.codes.dtype == torch.uint8
    assert decoded.codes.is_contiguous()
    assert decoded.codes.shape == (32, 24 * elements)
    assert int(decoded.codes.max()) < 16
    assert (decoded.scale.unit.dtype, decoded.scale.unit.shape) == (unit_type, (32, stretches * units))
    assert decoded.scale.unit.is_contiguous()
    if small is None:
        assert decoded.scale.codes is None
    else:
        assert decoded.scale.codes is not None
        assert (decoded.scale.codes.dtype, decoded.scale.codes.shape) == (small_type, (32, stretches * small))
        assert decoded.scale.codes.is_contiguous()


def test_decoded_q2_k_weights_have_the_documented_bits_groups_and_scales() -> None:
    decoded = decode_random("Q2_K", rows=32, blocks=24)
    assert (decoded.bits, decoded.zero, decoded.group_size, decoded.table) == (2, 0, 16, None)
    assert_codes(decoded, (32, 24 * 256))
    assert decoded.minimum is not None
    for number in (decoded.scale, decoded.minimum):
        assert (number.unit.dtype, number.unit.shape) == (torch.float16, (32, 24))
        assert number.codes is not None
        assert (number.codes.dtype, number.codes.shape) == (torch.uint8, (32, 24 * 16))
        assert (int(number.codes.min()), int(number.codes.max())) == (0, 15)


def test_decoded_q3_k_weights_have_the_documented_bits_groups_and_scales() -> None:
    decoded = decode_random("Q3_K", rows=32, blocks=24)
    assert (decoded.bits, decoded.zero, decoded.group_size, decoded.minimum, decoded.table) == (3, 4, 16, None, None)
    assert_codes(decoded, (32, 24 * 256))
    assert (decoded.scale.unit.dtype, decoded.scale.unit.shape) == (torch.float16, (32, 24))
    assert decoded.scale.codes is not None
    assert (decoded.scale.codes.dtype, decoded.scale.codes.shape) == (torch.int8, (32, 24 * 16))


@pytest.mark.parametrize(("kind", "groups", "highest"), [("TQ1_0", 8, 2), ("TQ2_0", 8, 3), ("Q1_0", 4, 2)])
def test_ternary_and_binary_gguf_types_decode_to_codes_of_two_bits(kind: str, groups: int, highest: int) -> None:
    decoded = decode_random(kind, rows=32, blocks=24)
    assert (decoded.bits, decoded.zero, decoded.group_size, decoded.minimum, decoded.table) == (2, 1, 32, None, None)
    assert (int(decoded.codes.min()), int(decoded.codes.max())) == (0, highest)
    assert (decoded.scale.unit.dtype, decoded.scale.unit.shape) == (torch.float16, (32, 24 * groups))
    assert decoded.scale.codes is None


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind.startswith(("IQ1", "IQ2", "IQ3"))])
def test_codes_of_iq_types_are_entries_of_their_codebook(kind: str) -> None:
    decoded = decode_random(kind, rows=32, blocks=24)
    assert decoded.codebook is not None
    width = decoded.codebook.shape[1]
    entries = {tuple(entry) for entry in decoded.codebook.tolist()}
    assert {tuple(entry) for entry in (decoded.codes & 7).view(-1, width)[::5].tolist()} <= entries
    assert decoded.rows(torch.tensor([3, 1])).codebook is decoded.codebook


def test_mxfp4_scales_are_float16_if_no_weight_changes() -> None:
    """A group of zeros has exponent 0, which float16 cannot represent. Its weights are zero with any scale."""
    weights = np.random.default_rng(1).normal(0, 0.02, (48, 512)).astype(np.float32)
    weights[3] = 0
    stored = gguf.quants.quantize(weights, GGMLQuantizationType.MXFP4)
    assert stored[3, 0] == 0
    ordinary = decode(GgmlType.MXFP4, stored.reshape(-1).copy(), weights.shape)
    assert isinstance(ordinary, GroupwiseTensor)
    assert ordinary.scale.unit.dtype == torch.float16
    assert torch.equal(
        ordinary.dequantize(), torch.from_numpy(gguf.quants.dequantize(stored, GGMLQuantizationType.MXFP4))
    )
    stored[5, 0] = 103
    assert decode(GgmlType.MXFP4, stored.reshape(-1).copy(), weights.shape).scale.unit.dtype == torch.float32


def test_growth_factor_of_a_gguf_type_is_its_memory_size_per_file_size() -> None:
    assert growth(GgmlType.IQ2_XXS) == (64 + 4 + 8) / 66  # per 8 weights, an index of 8 bits and 8 signs
    assert growth(GgmlType.IQ3_S) == (104 + 2 + 8) / 110  # per 4 weights, an index of 9 bits and 4 signs
    assert growth(GgmlType.IQ1_S) == (48 + 4 + 8) / 50  # per 8 weights, an index of 11 bits and a bit for the shift
    assert growth(GgmlType.Q6_K) == 1
    assert growth(GgmlType.F16) == 1


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_decoded_unquantized_gguf_types_equal_the_gguf_package(kind: str) -> None:
    weights = np.random.default_rng(2).normal(size=(6, 10)).astype(np.float32)
    stored = gguf.quants.quantize(weights, GGMLQuantizationType[kind])
    decoded = decode(GgmlType[kind], stored.view(np.uint8).reshape(-1).copy(), weights.shape)
    assert isinstance(decoded, torch.Tensor)
    assert decoded.dtype == {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert torch.equal(decoded.float(), torch.from_numpy(gguf.quants.dequantize(stored, GGMLQuantizationType[kind])))


def test_dequantize_rounds_only_once_to_the_requested_dtype() -> None:
    decoded = decode_random("Q4_1", rows=4, blocks=8)
    assert torch.equal(decoded.dequantize(torch.bfloat16), decoded.dequantize().to(torch.bfloat16))


def test_table_of_gguf_types_equals_that_of_the_gguf_package() -> None:
    reference = {kind.name: (kind.value, gguf.GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    ours = {kind.name: (kind.value, BLOCK_SIZES[kind]) for kind in BLOCK_SIZES}
    assert {name: ours.get(name) for name in reference} == reference


def test_all_gguf_types_used_for_weights_are_supported() -> None:
    everything = {kind.name for kind in GGMLQuantizationType}
    # Q8_1 is a type for activations; the others are not used for weights.
    unsupported = {"Q8_1", "F64", "I8", "I16", "I32", "I64"}
    assert {kind.name for kind in SUPPORTED_TYPES} == everything - unsupported
