"""Native kernels that work on single rows: norms, activations, rotation, and storing K and V in pages."""

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.linear_and_norm_operators import HeadNorms
from helexa.neuron.ops.native.native_ops import NativeOps
from neuron.ops import paging, random_weights

EPS = 1e-5
ULPS = 2.0**-22
"""A few roundings of float32."""
SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 96), (2, 2, 256), (3, 1, 512), (14, 2, 64)]


@pytest.mark.parametrize("width", [16, 64, 576, 1008])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_native_rms_norm_adds_the_residual_in_place_and_normalizes(native: NativeOps, rows: int, width: int) -> None:
    weight, delta, hidden = torch.randn(width), torch.randn(rows, width), torch.randn(rows, width)
    norm, residual = native.rms_norm(weight, EPS), hidden.clone()
    close(norm(residual, delta), normalized(hidden + delta, weight))
    assert torch.equal(residual, hidden + delta)
    close(norm(residual), normalized(residual, weight))
    assert torch.equal(residual, hidden + delta)


def test_choose_rows_keeps_the_requested_order(native: NativeOps) -> None:
    x, rows = torch.randn(20, 48), torch.tensor([19, 0, 7, 7], dtype=torch.int32)
    assert torch.equal(native.choose_rows(x, rows), x[rows])
    assert native.choose_rows(x, rows[:0]).shape == (0, 48)
    assert torch.equal(native.choose_rows(x.bfloat16(), rows), x.bfloat16()[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choose_rows_writes_the_rows_to_the_given_memory(native: NativeOps, dtype: torch.dtype) -> None:
    x, rows = torch.randn(20, 48, dtype=dtype), torch.tensor([19, 0, 7, 7], dtype=torch.int32)
    out = torch.zeros(4, 48)
    assert native.choose_rows(x, rows, out) is out
    assert torch.equal(out, x[rows].float())


def test_split_of_no_rows_by_heads_gives_each_head_no_rows(native: NativeOps) -> None:
    """The products of the heads read `starts`, and would follow numbers of an earlier step."""
    starts = torch.full((4,), 1 << 40)
    split = {"heads": 3, "width": 96, "first": 0, "count": 64}
    native._launcher.launch(
        "split_heads", x=torch.empty(0, 3, 96), out=torch.empty(0, 64), starts=starts, rows=0, **split
    )
    assert starts.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-4, 1e4, 1e15])
def test_native_norm_of_tiny_and_huge_values_matches_its_definition(native: NativeOps, scale: float) -> None:
    weight, hidden = torch.randn(64), torch.randn(3, 64) * scale
    close(native.rms_norm(weight, EPS)(hidden.clone()), normalized(hidden, weight))


@pytest.mark.parametrize("rows", [1, 40])
def test_native_silu_of_large_negative_and_positive_inputs_matches_float64(native: NativeOps, rows: int) -> None:
    gate, up = torch.randn(rows, 96) * 20, torch.randn(rows, 96)
    gate[0, :10] = torch.tensor([0.0, -0.0, -200.0, 200.0, -88.0, -1e-3, 3e38, -1e6, 1e-40, -1e-40])
    expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
    off = (native.gate_mul(torch.cat((gate, up), 1), "silu") - expected).abs()
    # The relative error of e^x is the absolute error of x in float32.
    assert (off <= 1e-30 + ULPS * (1 + gate.double().abs().clamp(max=200)) * expected.abs()).all()


def test_native_gelu_of_large_negative_and_positive_inputs_matches_float64(native: NativeOps) -> None:
    gate, up = torch.randn(40, 96) * 4, torch.randn(40, 96)
    gate[0, :10] = torch.tensor([0.0, -0.0, -200.0, 200.0, -10.0, -1e-3, 3e38, -3e38, 1e-40, -1e-40])
    out = native.gate_mul(torch.cat((gate, up), 1), "gelu_tanh")
    twice = 2 * (2 / torch.pi) ** 0.5 * (gate.double() + 0.044715 * gate.double() ** 3)
    expected = gate.double() * torch.sigmoid(twice) * up.double()  # (1 + tanh(x)) / 2 is the sigmoid of 2 x
    assert ((out - expected).abs() <= 1e-30 + ULPS * (1 + twice.abs().clamp(max=100)) * expected.abs()).all()
    as_torch_has_it = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(out, as_torch_has_it, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["Q4_0", "bfloat16"])
@pytest.mark.parametrize("columns", [96, 17 * 32, 520 * 32])  # around 16 and 512 groups, which are rounded at once
def test_fused_gate_of_a_product_equals_a_separate_gate_operation(
    native: NativeOps, columns: int, name: str, gate: str
) -> None:
    matrix, x = native.matrix(random_weights.make(name, 40, columns)), torch.randn(9, 2 * columns)
    expected = native.linear([matrix], None)(native.gate_mul(x, gate))
    assert torch.equal(native.linear([matrix], None, gate)(x), expected)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_native_rope_tables_at_large_positions_match_float64(native: NativeOps, factor: float) -> None:
    positions = torch.tensor([0, 1, 63, 64, 4095, 32767, 131072], dtype=torch.int32)
    frequencies = (10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)).float()
    angles = (positions[:, None].float() * frequencies).double()
    cos, sin = native.rope_tables(positions, frequencies, factor)
    torch.testing.assert_close(cos.double(), angles.cos() * factor, rtol=0, atol=2**-22)
    torch.testing.assert_close(sin.double(), angles.sin() * factor, rtol=0, atol=2**-22)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("normed", "turning"), [(False, 1.0), (True, 1.0), (True, 0.25), (False, 0.65)])
def test_queries_and_keys_are_rotated_and_keys_and_values_are_stored(
    native: NativeOps, heads: int, kv_heads: int, dim: int, normed: bool, turning: float
) -> None:
    rows, pages = 17, 4
    qkv, angles = torch.randn(rows, heads + 2 * kv_heads, dim) * 3, torch.randn(rows, int(dim * turning / 2))
    norms = HeadNorms(torch.randn(dim), torch.randn(dim), EPS) if normed else None
    slots = torch.randperm(pages * PAGE_SIZE)[:rows].int()
    cache = native.new_cache(kv_heads, pages, dim)
    queries = native.rotate_store(qkv, heads, (angles.cos(), angles.sin()), cache, slots, norms)
    expected = qkv.double()
    if norms is not None:
        expected[:, :heads] = normalized(expected[:, :heads], norms.query)
        expected[:, heads:-kv_heads] = normalized(expected[:, heads:-kv_heads], norms.key)
    rotated_heads = rotated(expected[:, :-kv_heads], angles)
    near_bfloat16(queries, rotated_heads[:, :heads])
    keys, values = paging.unlaid(cache, dim, 16)
    near_bfloat16(keys[slots], rotated_heads[:, heads:])
    assert torch.equal(values[slots], qkv[:, -kv_heads:].bfloat16().float())
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[slots] = False
    assert not keys[untouched].any()
    assert not values[untouched].any()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_values_in_an_int8_kv_cache_are_within_half_a_quantization_step(
    native_8: NativeOps, heads: int, kv_heads: int, dim: int
) -> None:
    """Each row has a page of its own, whose first key is 0, so that a key is the difference from its page's base."""
    rows = 9
    qkv, angles = torch.randn(rows, heads + 2 * kv_heads, dim), torch.randn(rows, dim // 2)
    qkv[1] = 0.0
    qkv[2, :, 3] = 1e4
    qkv[3] *= 1e-6
    slots = (torch.randperm(rows) * PAGE_SIZE + torch.randint(1, PAGE_SIZE, (rows,))).int()
    cache = native_8.new_cache(kv_heads, rows, dim)
    queries = native_8.rotate_store(qkv, heads, (angles.cos(), angles.sin()), cache, slots)
    rotated_heads = rotated(qkv[:, :-kv_heads].double(), angles)
    torch.testing.assert_close(paging.transformed(queries).double(), rotated_heads[:, :heads], rtol=1e-4, atol=3e-3)
    base, keys, values = paging.unlaid_bytes(cache, dim)
    assert not base.any()
    stored = (paging.transformed(rotated_heads[:, heads:]), qkv[:, -kv_heads:].double())
    for actual, expected in zip((keys, values), stored, strict=True):
        half_a_step = expected.abs().amax(-1, keepdim=True) / 254
        assert ((actual[slots] - expected).abs() <= half_a_step * (1 + 2.0**-10) + 1e-12).all()


@pytest.mark.parametrize("counts", [[130], [1] * 70, [30, 34, 1, 65]])
def test_keys_with_a_large_common_bias_are_precise_in_an_int8_kv_cache(native_8: NativeOps, counts: list[int]) -> None:
    """Keys with a common bias are as precise as without the bias, and do not depend on the chunks of their prompt."""
    dim, total, bias = 64, sum(counts), torch.zeros(64)
    bias[5], bias[40] = 200.0, -90.0
    qkv = torch.randn(total, 4, dim)
    qkv[:, :2] += bias
    tables, slots = (torch.ones(total, dim // 2), torch.zeros(total, dim // 2)), torch.arange(total).int()
    caches = [native_8.new_cache(2, 3, dim) for _ in range(2)]
    native_8.rotate_store(qkv, 0, tables, caches[0], slots)
    for rows in torch.arange(total).split(counts):
        chunk = tuple(table[rows] for table in tables)
        native_8.rotate_store(qkv[rows], 0, chunk, caches[1], slots[rows])
    assert torch.equal(*caches)
    keys, _ = paging.unlaid(caches[0], dim, 8)
    assert (keys[:total] - qkv[:, :2]).abs().max() < 0.1  # 0.4 if the bias took part in the scale


def test_rejected_draft_at_a_page_start_does_not_change_an_int8_kv_cache(native_8: NativeOps) -> None:
    """The draft's key was the base of the page until the sampled token replaced it."""
    dim, total, kept = 64, 70, PAGE_SIZE
    qkv, slots = torch.randn(total, 4, dim), torch.arange(total).int()
    tables = (torch.ones(total, dim // 2), torch.zeros(total, dim // 2))

    def store(cache: torch.Tensor, first: int, last: int, values: torch.Tensor = qkv) -> None:
        rows = slice(first, last)
        native_8.rotate_store(values[rows], 0, (tables[0][rows], tables[1][rows]), cache, slots[rows])

    plain, drafted = (native_8.new_cache(2, 2, dim) for _ in range(2))
    store(plain, 0, total)
    store(drafted, 0, kept)
    store(drafted, kept, kept + 4, 50 * torch.randn(total, 4, dim))
    for row in range(kept, total):
        store(drafted, row, row + 1)
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("place", [0, 17, 32, 63])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", [0, 1])
def test_non_finite_head_in_an_int8_kv_cache_does_not_affect_other_heads(
    native_8: NativeOps, place: int, number: float, row: int
) -> None:
    """Row 0 is the first row of the page, whose key is the base of the page if it is finite."""
    rows, dim = 3, 64
    qkv, no_rotation = torch.randn(rows, 3, dim), (torch.ones(rows, dim // 2), torch.zeros(rows, dim // 2))
    qkv[row, 1:, place] = number
    cache = native_8.new_cache(1, 1, dim)
    native_8.rotate_store(qkv, 1, no_rotation, cache, torch.arange(rows, dtype=torch.int32))
    for values in paging.unlaid(cache, dim, 8):
        assert values[[1 - row, 2]].isfinite().all()
        assert not values[row].isfinite().any()


@pytest.mark.parametrize(
    "change",
    [
        {"moe_intermediate_size": 40},
        {"shared_expert_intermediate_size": 24},
        {"linear_value_head_dim": 24},
        {"mamba_d_head": 24},
        {"mamba_d_state": 1024},
    ],
)
def test_unsupported_widths_of_experts_or_recurrent_layers_give_a_reason(change: dict[str, int]) -> None:
    config = {"hidden_size": 128, "num_attention_heads": 4}
    assert NativeOps.unsupported_shape(config) is None
    assert NativeOps.unsupported_shape(config | change) is not None


@pytest.mark.parametrize("dim", [16, 48, 80, 112, 240])
def test_unsupported_head_size_is_rejected(dim: int) -> None:
    config = {"hidden_size": 4 * dim, "intermediate_size": 64, "num_attention_heads": 4}
    assert NativeOps.unsupported_shape(config) is not None


@pytest.mark.parametrize("change", [{"global_head_dim": 608}, {"global_head_dim": 48}, {"head_dim": 608}])
def test_unsupported_head_size_of_some_layers_is_rejected(change: dict[str, int]) -> None:
    config = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 256, "global_head_dim": 512}
    assert NativeOps.unsupported_shape(config) is None
    assert NativeOps.unsupported_shape(config | change) is not None


@pytest.mark.parametrize("bits", [16, 8])
def test_page_bytes_equal_the_size_of_an_allocated_kv_cache(native: NativeOps, native_8: NativeOps, bits: int) -> None:
    ops = native if bits == 16 else native_8
    assert ops.new_cache(3, 5, 64).nbytes == 5 * ops.page_bytes(3, 64)
    scales_and_base = 3 * 4 * PAGE_SIZE + 2 * 64 if bits == 8 else 0
    assert ops.page_bytes(3, 64) == 3 * (PAGE_SIZE * 2 * 64 * bits // 8 + scales_and_base)


@pytest.fixture
def native_8(native: NativeOps) -> NativeOps:
    return NativeOps(native._library, 2, kv_bits=8)


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate halves in pairs with float32 cos and sin, as the kernel does; dimensions beyond `angles` are unchanged."""
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    half = angles.shape[1]
    first, second, unrotated = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, unrotated), -1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=ULPS, atol=1e-12)


def near_bfloat16(actual: Tensor, expected: Tensor) -> None:
    """Assert equality within bfloat16 rounding and the float32 error of sums whose terms nearly cancel."""
    torch.testing.assert_close(actual.double(), expected, rtol=2.0**-8, atol=1e-5)
