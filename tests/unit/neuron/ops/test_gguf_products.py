"""Products with blocks of every GGUF type, filled with random bytes."""

from dataclasses import replace

import pytest
import torch

from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType
from neuron.ops import float64
from neuron.weights.test_gguf_blocks import BLOCKS, decode_random

WIDENED = "NVFP4"  # multiplied in bfloat16
LOW_BIT = ["Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ2_0"]
"""Types with one to three bits per weight."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_product_with_gguf_blocks_of_every_type_matches_float64(native: NativeOps, kind: str) -> None:
    weight = decode_random(kind, 20, 16)
    if kind == "MXFP4":  # its scales can overflow float32 sums
        weight = replace(weight, scale=replace(weight.scale, unit=weight.scale.unit.clamp(max=2.0**60)))
    matrix, x = native.matrix(weight), torch.randn(7, weight.shape[1])
    assert (matrix.number is None) == (kind == WIDENED)
    out = native.linear([matrix], None)(x)
    expected = float64.product(x, weight.dequantize(torch.bfloat16) if kind == WIDENED else weight)
    assert ((out - expected.exact).abs() <= expected.tolerance).all()
    assert torch.equal(native.linear([matrix], None)(x[3:4]), out[3:4])


@pytest.mark.parametrize("kind", LOW_BIT)
def test_packed_low_bit_gguf_types_take_at_most_1_3_times_their_size_in_the_file(native: NativeOps, kind: str) -> None:
    """IQ1 takes up to 1.6 times its size, because its codebook is too large for fast lookups."""
    weight, (weights, nbytes) = decode_random(kind, 2, 16), BLOCK_SIZES[GgmlType[kind]]
    in_file = 4096 * weight.shape[1] * nbytes // weights
    assert native.matrix_bytes(weight.on_meta(4096)) <= (1.61 if kind.startswith("IQ1") else 1.3) * in_file
    assert native.matrix(weight).nbytes == native.matrix_bytes(weight)


@pytest.mark.parametrize("kind", [kind for kind in LOW_BIT if kind.startswith("IQ")])
def test_rows_multiplied_by_pairs_of_tiles_are_bit_identical_to_rows_alone(native: NativeOps, kind: str) -> None:
    """A thread multiplies two tiles at once only if a matrix has many rows, and only five or six rows of a batch."""
    weight, x = decode_random(kind, 520, 3), torch.randn(15, 768)
    linear = native.linear([native.matrix(weight)], None)
    together = linear(x)
    for row in range(15):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    assert torch.equal(linear(x[:11]), together[:11])


@pytest.mark.parametrize("kind", ["IQ1_M", "IQ2_XXS", "IQ3_S"])
def test_many_rows_with_few_columns_are_bit_identical_to_rows_alone(native: NativeOps, kind: str) -> None:
    """A thread multiplies at most 96 rows by indexes at once. With few columns, other formats multiply more rows."""
    weight, x = decode_random(kind, 300, 1), torch.randn(205, 256)
    linear = native.linear([native.matrix(weight)], None)
    together = linear(x)
    for rows in (slice(0, 1), slice(90, 95), slice(94, 101), slice(197, 205)):
        assert torch.equal(linear(x[rows]), together[rows])


def test_matrix_packed_without_its_codebook_is_larger_and_gives_equal_products(native: NativeOps) -> None:
    weight, x = decode_random("IQ2_XXS", 20, 2), torch.randn(7, 512)
    indexes, codes = native.matrix(weight), native.matrix(replace(weight, codebook=None))
    assert indexes.nbytes < codes.nbytes
    assert torch.equal(native.linear([indexes], None)(x), native.linear([codes], None)(x))
