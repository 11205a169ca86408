"""Products with packed weights of every format: near the definition, and each row the same in any company."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native import NativeOps
from helexa.neuron.weights.formats import GroupScale, GroupwiseTensor, Weight
from neuron.ops import oracle, random_weights
from neuron.ops.conftest import THREADS

ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 250, 513)  # around 8 that go together, and 240 between which weights are unpacked
CASES = [
    (name, outputs, columns)
    for name in random_weights.ALL
    for outputs, columns in [
        (100, 2 * random_weights.SPAN),
        (16, random_weights.SPAN),
        (1, random_weights.step(name)),
        (33, 17 * 32 if random_weights.step(name) <= 32 else 3 * random_weights.SPAN),  # beyond 16 groups at once
    ]
]


def activations(rows: int, columns: int) -> Tensor:
    """Random rows, then such as rounding finds hard."""
    x = torch.randn(rows, columns)
    hard = [
        torch.zeros(columns),
        torch.full((columns,), -0.0),
        torch.randn(columns) + 1000.0 * (torch.arange(columns) % 32 == 5),  # an outlier in every group
        torch.randn(columns) * 1e30,
        torch.randn(columns) * 1e-30,
        torch.full((columns,), 1e-40),  # no inverse of its scale fits into float32
        torch.where(torch.arange(columns) % 64 < 32, 0.0, 1.0),  # every other group is nought
        torch.linspace(-1, 1, columns),
        torch.where(torch.arange(columns) % 32 == 0, 127.0, torch.arange(columns) % 32 - 15.5),  # halves, to even ones
        torch.where(torch.arange(columns) % 32 == 0, 32639.0, torch.arange(columns) % 32 * 256 - 128.0),  # lowest bytes
        torch.where(torch.arange(columns) % 32 == 0, -32639.0, torch.arange(columns) % 32 - 15.5),
        torch.full((columns,), 1.0),  # sums of whole numbers as large as they get
    ]
    for row, values in enumerate(hard[:rows]):
        x[-1 - row] = values
    return x


def near(actual: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None, bits: int = 16) -> None:
    """Assert that a product is what its number format allows."""
    expected = oracle.product(x, weight, bits)
    shift = torch.zeros(()) if bias is None else bias.double()
    tolerance = expected.tolerance + oracle.EPSILON * (expected.exact + shift).abs()
    assert actual.isfinite().all()
    assert ((actual - (expected.exact + shift)).abs() <= tolerance).all()
    assert ((actual - (expected.unrounded + shift)).abs() <= expected.rounding + tolerance).all()


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("name", "outputs", "columns"), CASES)
def test_a_product_is_exact_but_for_the_rounding_of_activations(
    library: KernelLibrary, name: str, outputs: int, columns: int, bits: int
) -> None:
    native = NativeOps(library, THREADS, x_bits=bits)
    weight, x = random_weights.make(name, outputs, columns), activations(ROWS[-1], columns)
    near(native.linear([native.matrix(weight)], None)(x), x, weight, bits=bits)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("name", "outputs", "columns"), CASES)
def test_a_row_comes_out_the_same_however_many_are_beside_it(
    library: KernelLibrary, name: str, outputs: int, columns: int, bits: int
) -> None:
    native = NativeOps(library, THREADS, x_bits=bits)
    weight, x = random_weights.make(name, outputs, columns), activations(ROWS[-1], columns)
    linear = native.linear([native.matrix(weight)], torch.randn(outputs))
    together = linear(x)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), together[:rows])
    for first, end in pairwise((0, 1, 240, 247, 505, 513)):
        assert torch.equal(linear(x[first:end]), together[first:end])


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("name", random_weights.ALL)
def test_what_is_no_number_makes_none(library: KernelLibrary, name: str, bits: int) -> None:
    native = NativeOps(library, THREADS, x_bits=bits)
    x = torch.randn(7, 256)
    x[1, 100], x[3, 7], x[4, 255] = float("nan"), float("inf"), -float("inf")
    out = native.linear([native.matrix(random_weights.make(name, 40, 256))], None)(x)
    assert out.isfinite().all(1).tolist() == [True, False, True, False, False, True, True]
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("rows", [1, 5, 260])
def test_parts_of_mixed_formats_lie_side_by_side(native: NativeOps, rows: int) -> None:
    sizes = {"Q4_K": 48, "bfloat16": 20, "Q6_K": 33, "Q8_0": 1, "Q5_1": 64}
    weights = [random_weights.make(name, outputs, 512) for name, outputs in sizes.items()]
    bias, x = torch.randn(sum(sizes.values())), activations(rows, 512)
    parts = [native.matrix(weight) for weight in weights]
    plain, biased = (native.linear(parts, b)(x).split(list(sizes.values()), 1) for b in (None, bias))
    for weight, without, shifted, shift in zip(weights, plain, biased, bias.split(list(sizes.values())), strict=True):
        near(without, x, weight)
        near(shifted, x, weight, shift)


@pytest.mark.parametrize("name", random_weights.ALL)
def test_no_rows_make_no_product(native: NativeOps, name: str) -> None:
    weight = random_weights.make(name, 16, 256)
    assert native.linear([native.matrix(weight)], None)(torch.empty(0, 256)).shape == (0, 16)


@pytest.mark.parametrize("name", random_weights.ALL)
def test_weights_that_differ_in_one_column_differ_in_that_alone(native: NativeOps, name: str) -> None:
    weight = random_weights.make(name, 16, 256)
    x = torch.cat((torch.eye(256)[-1:], torch.randn(1, 256) * (torch.arange(256) < 255)))
    twins = native.linear([native.matrix(weight)], None)(x)[:, [-4, -3]]
    assert twins[0, 0] != twins[0, 1]
    assert twins[1, 0] == twins[1, 1]


@pytest.mark.parametrize(("name", "outputs", "columns"), CASES)
def test_tiles_give_back_the_rows_that_were_packed(native: NativeOps, name: str, outputs: int, columns: int) -> None:
    """Codes, scales and minimums of every lane, through the embedding."""
    weight = random_weights.make(name, outputs, columns)
    tokens = torch.cat((torch.randperm(outputs), torch.tensor([0, outputs - 1, 0]))).int()
    matrix = native.matrix(weight)
    rows = native.embedding(matrix, tokens)
    assert torch.equal(rows.double(), random_weights.plain(weight)[tokens])
    assert torch.equal(native.embedding(matrix, tokens, 25.25), rows * 25.25)


def test_formats_that_no_kernel_knows_are_kept_as_bfloat16(native: NativeOps) -> None:
    known = random_weights.make("Q4_0", 20, 96)
    assert isinstance(known, GroupwiseTensor)
    odd = replace(known, zero=7)
    packed = native.matrix(odd)
    assert packed.number is None
    tokens = torch.arange(20, dtype=torch.int32)
    rows = odd.dequantize(torch.bfloat16).float()
    assert torch.equal(native.embedding(packed, tokens), rows)
    assert torch.equal(native.embedding(packed, tokens, 25.25), rows * 25.25)


def test_units_in_float32_become_float16_where_that_is_near_enough(native: NativeOps) -> None:
    known = random_weights.make("Q8_0", 20, 96)
    assert isinstance(known, GroupwiseTensor)
    unit = known.scale.unit.float()
    assert native.matrix(replace(known, scale=GroupScale(unit))).number == native.matrix(known).number
    for factor, kept in [(1 + 2.0**-15, True), (1e6, False), (1e-6, False)]:
        weight = replace(known, scale=GroupScale(unit.abs().clamp(min=0.5) * factor))
        matrix = native.matrix(weight)
        assert (matrix.number is not None) == kept
        rows, exact = native.embedding(matrix, torch.arange(20, dtype=torch.int32)), weight.dequantize()
        torch.testing.assert_close(rows, exact, rtol=2.0**-11 if kept else 2.0**-8, atol=0)


def test_powers_of_two_are_the_same_form_in_every_type(native: NativeOps) -> None:
    """So that the experts of a layer are all packed alike."""
    weight = random_weights.make("IQ4_NL", 16, 64)
    assert isinstance(weight, GroupwiseTensor)
    for low, dtype in [(-20, torch.float16), (-20, torch.float32), (-120, torch.float32)]:
        unit = torch.linspace(low, 0, 32).round().exp2().view(16, 2).to(dtype)
        matrix = native.matrix(replace(weight, scale=GroupScale(unit)))
        assert matrix.number == native.matrix(random_weights.make("MXFP4", 16, 64)).number


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K", "Q6_K", "Q3_K", "IQ4_XS"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_of_scales_are_read_as_what_they_are(native: NativeOps, name: str, dtype: torch.dtype) -> None:
    weight = random_weights.make(name, 16, 512)
    assert isinstance(weight, GroupwiseTensor)
    assert weight.scale.codes is not None
    kernels_type = torch.uint8 if name == "Q4_K" else torch.int8
    for most, may_be_packed in [(127, True), (255, dtype == kernels_type)]:
        codes = torch.randint(0, most + 1, weight.scale.codes.shape).to(torch.uint8).view(dtype)
        changed = replace(weight, scale=replace(weight.scale, codes=codes))
        matrix = native.matrix(changed)
        assert (matrix.number is not None) == may_be_packed
        expected = changed.dequantize(torch.float32 if may_be_packed else torch.bfloat16).float()
        assert torch.equal(native.embedding(matrix, torch.arange(16, dtype=torch.int32)), expected)


def test_bytes_of_a_step_are_those_of_the_tiles(native: NativeOps) -> None:
    weight = random_weights.make("Q4_0", 64, 512)
    native.linear([native.matrix(weight)], None)
    assert native.step_bytes == 64 * 512 // 32 * 18
