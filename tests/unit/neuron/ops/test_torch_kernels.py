"""The CPU operations built from stock torch, compared with their definitions."""

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind, Batch, Capacity
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.linear_and_norm_operators import FewPassRmsNorm, RmsNorm
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.torch_cpu_ops import CpuOps, Int4Linear
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor
from neuron.ops import float64, paging, random_weights

KINDS = [
    AttentionKind(32**-0.5),
    AttentionKind(0.1, window=64),
    AttentionKind(0.2, sinks=torch.tensor([0.0, 5.0, -5.0, 1.0, -1.0, 50.0])),
    AttentionKind(0.3, window=10, sinks=torch.linspace(-2, 2, 6)),
    AttentionKind(0.3, cap=1.5),
]
needs_bfloat16 = pytest.mark.skipif(not CpuOps.available(), reason="this CPU does not multiply bfloat16")


def test_torch_norm_matches_its_definition_even_for_tiny_inputs() -> None:
    weight = torch.randn(96)
    for scale in (1.0, 1e-4, 0.0):
        x = torch.randn(5, 96) * scale
        expected = RmsNorm(weight, 1e-5, torch.float32)(x)
        torch.testing.assert_close(FewPassRmsNorm(weight, 1e-5, torch.float32)(x), expected)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("pages", [[4, 5, 6, 7], [5, 6, 9, 7]])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_attention_of_chunk_rows_matches_the_definition(
    prefix: int, pages: list[int], kind: AttentionKind
) -> None:
    count = 70
    ops, cache = filled()
    plan = [paging.entry(0, prefix, count, pages[: -(-(prefix + count) // PAGE_SIZE)])]
    queries = torch.randn(count, 6, 32)
    out = ops.attend(queries, cache, lay_out(plan), kind)
    for row in (0, 1, count // 2, count - 1):
        near_the_definition(out[row], queries[row], cache, pages, prefix + row + 1, kind)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [700], [3, 64, 100, 511, 512, 513]])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_attention_of_one_query_per_sequence_matches_the_definition(
    lengths: list[int], kind: AttentionKind
) -> None:
    ops, cache = filled()
    numbers = iter(torch.randperm(64).tolist())
    pages = [[next(numbers) for _ in range(-(-length // PAGE_SIZE))] for length in lengths]
    plan = [paging.entry(n, length - 1, 1, pages[n]) for n, length in enumerate(lengths)]
    queries = torch.randn(len(lengths), 6, 32)
    out = ops.attend(queries, cache, lay_out(plan), kind)  # shortest first, as `plan` is
    for n, length in enumerate(lengths):
        near_the_definition(out[n], queries[n], cache, pages[n], length, kind)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 33])
@pytest.mark.parametrize("name", random_weights.ALL)
def test_torch_products_in_bfloat16_and_int4_match_float64_within_rounding(name: str, rows: int) -> None:
    weight, bias = random_weights.make(name, 96, 512), torch.randn(96)
    exact, ops = random_weights.plain(weight), CpuOps(paging.CPU, torch.bfloat16)
    x = torch.randn(rows, 512).bfloat16()
    tolerance = 2.0**-7 * (x.double().abs() @ exact.abs().T + bias.abs())
    for shift in (None, bias):
        out = ops.linear([ops.matrix(weight)], shift)(x)
        expected = x.double() @ exact.T + (0 if shift is None else shift)
        assert ((out - expected).abs() <= tolerance).all()


@needs_bfloat16
def test_torch_products_of_4_bit_weights_computed_as_int4_match_float64_within_rounding() -> None:
    weight = random_weights.make("Q4_1", 96, 512)
    assert isinstance(weight, GroupwiseTensor)
    assert weight.minimum is not None
    assert Int4Linear.fits(weight)
    x, exact = torch.randn(3, 512).bfloat16(), random_weights.plain(weight)
    size = x.double().abs() @ (exact.abs() + 2 * weight.minimum.values().double().abs().repeat_interleave(32, 1)).T
    assert ((Int4Linear(weight)(x) - x.double() @ exact.T).abs() <= 2.0**-7 * size).all()


def filled() -> tuple[ReferenceOps, Tensor]:
    ops = ReferenceOps(paging.CPU, torch.float32)
    cache = ops.new_cache(2, 64, 32)
    cache.copy_(torch.randn(cache.shape))
    return ops, cache


def lay_out(plan: list[paging.PlanEntry]) -> Batch:
    return paging.batch_of(plan, Capacity(rows=128, sequences=16, pages_per_sequence=64))


def near_the_definition(
    out: Tensor, query: Tensor, cache: Tensor, pages: list[int], length: int, kind: AttentionKind
) -> None:
    keys, values = cache[:, :, paging.slots_of(pages, length)].transpose(1, 2)
    expected, _ = float64.attention(query, keys, values, kind)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
