"""Kernels that work on single rows compared with plain torch: norms, gates, rotation and storage."""

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind, Capacity
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.linear_and_norm_operators import HeadNorms
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.triton import kv_cache
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from neuron.ops import float64, paging
from neuron.ops.paging import CPU

PAGES = 5
SLOTS = [0, 63, 64, -1, 200, 319]
CAPACITY = Capacity(rows=100, sequences=4, pages_per_sequence=PAGES)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def near(out: Tensor, expected: Tensor) -> None:
    """Assert equality except for the last one or two bits of the output type."""
    assert out.dtype == expected.dtype
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), expected.double(), rtol=2 * eps, atol=2 * eps, equal_nan=True)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 300), (2, 1024), (0, 64)])
def test_norm_kernel_adds_the_residual_before_normalizing(rows: int, width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(width)
    ours, theirs = (ops.rms_norm(weight, 1e-6) for ops in (GpuOps(CPU, dtype), ReferenceOps(CPU, dtype)))
    stream, delta = torch.randn(rows, width) * 30, torch.randn(rows, width).to(dtype)
    expected_stream, original_delta = stream.clone(), delta.clone()
    near(ours(stream, delta), theirs(expected_stream, delta))
    assert torch.equal(stream, expected_stream)
    near(ours(delta), theirs(delta))
    assert torch.equal(delta, original_delta)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1500)])
def test_gate_mul_matches_torch(rows: int, width: int, gate: str, dtype: torch.dtype) -> None:
    gate_up = torch.randn(rows, 2 * width) * 5
    gate_up[0, :4] = torch.tensor([-80.0, 80.0, 0.0, -300.0])
    exact = ReferenceOps(CPU, torch.float64).gate_mul(gate_up.to(dtype).double(), gate)
    near(GpuOps(CPU, dtype).gate_mul(gate_up.to(dtype), gate), exact.to(dtype))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated", "dtype"),
    [
        (6, 2, 64, 64, torch.bfloat16),
        (5, 1, 80, 40, torch.float32),
        (1, 1, 24, 16, torch.float16),
        (3, 1, 256, 64, torch.bfloat16),
    ],
)
def test_queries_and_keys_are_normalized_rotated_and_stored(
    heads: int, kv_heads: int, dim: int, rotated: int, normed: bool, dtype: torch.dtype
) -> None:
    ours, theirs = GpuOps(CPU, dtype), ReferenceOps(CPU, dtype)
    qkv = torch.randn(len(SLOTS), heads + 2 * kv_heads, dim).to(dtype)
    rope = theirs.rope_tables(torch.arange(len(SLOTS)) * 1000, torch.rand(rotated // 2))
    norms = HeadNorms(torch.randn(dim), torch.randn(dim), 1e-6) if normed else None
    cache, expected_cache = (ops.new_cache(kv_heads, PAGES, dim) for ops in (ours, theirs))
    stored_rows = [row for row, slot in enumerate(SLOTS) if slot >= 0]
    slots = torch.tensor(SLOTS)
    expected = theirs.rotate_store(qkv.clone(), heads, rope, expected_cache, slots.clamp(min=0), norms)
    expected_cache[:, :, 0] = 0  # the padding row, whose slot is -1, writes here
    theirs.rotate_store(
        qkv[stored_rows], heads, tuple(table[stored_rows] for table in rope), expected_cache, slots[stored_rows], norms
    )  # type: ignore[arg-type]
    near(ours.rotate_store(qkv, heads, rope, cache, slots, norms), expected)
    near(cache, expected_cache)


@pytest.mark.parametrize("dim", [24, 128, 384, 512])
def test_number_of_warps_of_a_row_kernel_is_a_power_of_two(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, int] = {}
    monkeypatch.setattr(kv_cache, "launch", lambda *arguments, **constants: given.update(constants))
    ops = GpuOps(CPU, torch.float32)
    rope = torch.ones(1, dim // 2), torch.zeros(1, dim // 2)
    ops.rotate_store(torch.zeros(1, 3, dim), 1, rope, ops.new_cache(1, 1, dim), torch.tensor([0]))
    assert given["warps"].bit_count() == 1, "Triton takes no other number"


@pytest.mark.parametrize("dim", [64, 80])
def test_int8_kv_cache_rounds_by_half_a_step_and_attention_over_it_matches_float64(dim: int) -> None:
    ops = GpuOps(CPU, torch.float32, kv_bits=8)
    cache = ops.new_cache(2, PAGES, dim)
    assert cache.nbytes == PAGES * ops.page_bytes(2, dim)
    pages, length = [3, 0], 70
    keys, values = torch.randn(2, length, 2, dim) * torch.logspace(-40, 4, 2 * length).view(2, length, 1, 1)
    keys[5] = 0
    no_rotation = torch.ones(length, dim // 2), torch.zeros(length, dim // 2)
    ops.rotate_store(torch.cat((keys, values), 1), 0, no_rotation, cache, paging.slots_of(pages, length))
    read = in_numbers(cache, dim)[:, :, paging.slots_of(pages, length)].transpose(1, 2)
    for stored, given in zip(read, (keys, values), strict=True):
        step = given.abs().amax(-1, keepdim=True) / 127
        assert ((stored - given).abs() <= 0.5001 * step + 1e-30).all()

    queries = torch.randn(length, 6, dim)
    kind = AttentionKind(dim**-0.5)
    for prefix, count in [(length - 1, 1), (50, 20)]:
        batch = paging.batch_of([paging.entry(0, prefix, count, pages)], CAPACITY)
        out = ops.attend(queries[:count], cache, batch, kind)
        for row in {0, count // 2, count - 1}:
            visible = slice(0, prefix + row + 1)
            expected, size = float64.attention(queries[row], read[0][visible], read[1][visible], kind)
            assert ((out[row] - expected).abs() <= 2.0**-16 * size).all()


@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize("which", [0, 1])
def test_non_finite_values_stay_non_finite_in_any_kv_cache(kv_bits: int, which: int) -> None:
    ops, dim = GpuOps(CPU, torch.float32, kv_bits), 64
    cache, broken = ops.new_cache(1, PAGES, dim), torch.randn(2, 2, 1, dim)
    broken[which, 0, 0, 40] = float("nan")
    no_rotation = torch.ones(2, dim // 2), torch.zeros(2, dim // 2)
    ops.rotate_store(torch.cat((torch.randn(2, 1, dim), *broken), 1), 1, no_rotation, cache, torch.tensor([0, 1]))
    out = ops.attend(
        torch.randn(1, 1, dim),
        cache,
        paging.batch_of([paging.entry(0, 1, 1, [0])], CAPACITY),
        AttentionKind(1.0),
    )
    assert out.isnan().any()


def in_numbers(cache: Tensor, dim: int) -> Tensor:
    """Return K and V of an int8 cache, dequantized: float32 [2, kv_heads, slots, D]."""
    pages, kv_heads, _ = cache.shape
    bytes_, scales = cache.split((2 * PAGE_SIZE * dim, 2 * PAGE_SIZE * 4), -1)
    numbers = bytes_.contiguous().view(torch.int8).view(pages, kv_heads, 2, PAGE_SIZE, dim).float()
    numbers *= scales.contiguous().view(torch.float32).view(pages, kv_heads, 2, PAGE_SIZE, 1)
    return numbers.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, pages * PAGE_SIZE, dim)
