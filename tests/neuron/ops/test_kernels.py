"""Every kernel against its twin in plain torch, on random inputs of many shapes."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.batch import Batch, Chunk, DecodeGroup
from helexa.neuron.ops.compiler import native_kernels
from helexa.neuron.ops.cpu import CpuOps, Int4Linear, PrepackedLinear
from helexa.neuron.ops.native import NativeOps
from helexa.neuron.ops.norm import FewPassRmsNorm, RmsNorm
from helexa.neuron.ops.reference import ReferenceOps
from helexa.neuron.weights.formats import GroupwiseTensor

CPU = torch.device("cpu")
PAGE = 64
REFERENCE = ReferenceOps(CPU, torch.bfloat16)
LIBRARY = native_kernels()

needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="no C compiler on this machine: plain torch serves")
needs_bfloat16 = pytest.mark.skipif(not CpuOps.available(), reason="this CPU does not multiply bfloat16")


@pytest.fixture
def native() -> NativeOps:
    assert LIBRARY is not None
    return NativeOps(CPU, torch.bfloat16, LIBRARY)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def near(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of bfloat16, which has 8 bits."""
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-7, atol=2**-7)


@needs_compiler
@pytest.mark.parametrize("width", [64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_rms_norm_adds_and_normalises(native: NativeOps, rows: int, width: int) -> None:
    weight, delta = torch.randn(width), torch.randn(rows, width).bfloat16()
    hidden = torch.randn(rows, width)
    ours, theirs = hidden.clone(), hidden.clone()
    near(native.rms_norm(weight, 1e-5)(ours, delta), RmsNorm(weight, 1e-5, torch.bfloat16)(theirs, delta))
    torch.testing.assert_close(ours, theirs)
    near(native.rms_norm(weight, 1e-5)(ours), RmsNorm(weight, 1e-5, torch.bfloat16)(theirs))


def test_the_norm_in_few_passes_is_the_same_even_for_tiny_inputs() -> None:
    weight = torch.randn(96)
    for scale in (1.0, 1e-4, 0.0):
        x = torch.randn(5, 96) * scale
        expected = RmsNorm(weight, 1e-5, torch.float32)(x)
        torch.testing.assert_close(FewPassRmsNorm(weight, 1e-5, torch.float32)(x), expected)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 40])
def test_silu_mul_holds_at_both_ends(native: NativeOps, rows: int) -> None:
    gate_up = (torch.randn(rows, 2 * 96) * 20).bfloat16()
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, -1e-3])
    near(native.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128)])
@pytest.mark.parametrize("rows", [1, 17])
def test_rotate_store_turns_queries_and_keys_and_stores(
    native: NativeOps, rows: int, heads: int, kv_heads: int, dim: int
) -> None:
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).bfloat16()
    angles = torch.randn(rows, 1, dim // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.randperm(4 * PAGE)[:rows]
    ours = native.new_cache(kv_heads, 4 * PAGE, dim)
    theirs = REFERENCE.new_cache(kv_heads, 4 * PAGE, dim)
    expected = REFERENCE.rotate_store(qkv.clone(), heads, cos, sin, theirs, slots)
    near(native.rotate_store(qkv.clone(), heads, cos, sin, ours, slots), expected)
    near(ours, theirs)
    assert ours.any()


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (7, 1, 64), (6, 2, 128), (5, 1, 128), (4, 4, 32)])
@pytest.mark.parametrize("lengths", [[1], [64], [65], [700], [1030], [3, 64, 100, 511, 512, 513]])
def test_decode_attention(native: NativeOps, lengths: list[int], heads: int, kv_heads: int, dim: int) -> None:
    cache = torch.randn(2, kv_heads, 64 * PAGE, dim).bfloat16()
    group, pages = decode_group(lengths)
    queries = torch.randn(len(lengths), heads + 2, dim).bfloat16()[:, :heads]  # strided, as the fused qkv leaves them
    batch = Batch(*(torch.empty(0),) * 4, decodes=[group], chunks=[])
    out = native.attend(queries, cache, PAGE, batch)
    for row, length in enumerate(lengths):
        near(out[row], plain_attention(queries[row], cache, pages[row], length))
    near(out, REFERENCE.attend(queries, cache, PAGE, batch))


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("gap", [False, True])
def test_prefill_attention_is_causal_over_prefix_and_chunk(prefix: int, gap: bool) -> None:
    heads, kv_heads, dim, count = 6, 2, 32, 70
    ops = ReferenceOps(CPU, torch.float32)
    cache = torch.randn(2, kv_heads, 16 * PAGE, dim)
    pages = [5, 6, 9, 7] if gap else [4, 5, 6, 7]
    pages = pages[: -(-(prefix + count) // PAGE)]
    chunk = Chunk(slice(0, count), prefix, torch.tensor(pages), None if gap and len(pages) > 2 else pages[0])
    queries = torch.randn(count, heads, dim)
    out = ops.attend(queries, cache, PAGE, Batch(*(torch.empty(0),) * 4, decodes=[], chunks=[chunk]))
    for row in (0, 1, count // 2, count - 1):
        expected = plain_attention(queries[row], cache, pages, prefix + row + 1)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 33])
@pytest.mark.parametrize("shape", [(960, 576), (64, 1536), (48, 64)])
def test_packed_products(rows: int, shape: tuple[int, int]) -> None:
    groups = (shape[0], shape[1] // 32)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    weight = GroupwiseTensor(codes, torch.rand(groups) * 0.02, torch.randn(groups) * 0.1, bits=4, group_size=32)
    x = torch.randn(rows, shape[1]).bfloat16()
    exact = x.float() @ weight.dequantize().T
    scale = exact.abs().mean()
    for op in (Int4Linear(weight, None), PrepackedLinear(weight.dequantize(torch.bfloat16), None)):
        assert (op(x).float() - exact).abs().max() < 0.05 * scale
    bias = torch.randn(shape[0]).bfloat16()
    for op in (Int4Linear(weight, bias), PrepackedLinear(weight.dequantize(torch.bfloat16), bias)):
        assert (op(x).float() - exact - bias.float()).abs().max() < 0.06 * (scale + 1)


def test_without_a_compiler_plain_torch_serves() -> None:
    code = (
        "import torch; from helexa.neuron.ops import choose; "
        "print(*(choose(torch.device('cpu'), dtype).name for dtype in (torch.bfloat16, torch.float32)))"
    )
    environment = os.environ | {"PATH": "/nonexistent", "CC": "/nonexistent/cc"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == [CpuOps.name if CpuOps.available() else ReferenceOps.name, ReferenceOps.name]


def decode_group(lengths: list[int]) -> tuple[DecodeGroup, list[list[int]]]:
    numbers = iter(torch.randperm(64).tolist())
    pages = [[next(numbers) for _ in range(-(-length // PAGE))] for length in lengths]
    width = max(len(own) for own in pages)
    padded = [own + own[:1] * (width - len(own)) for own in pages]
    group = DecodeGroup(slice(0, len(lengths)), torch.tensor(padded), torch.tensor(lengths), max(lengths), None)
    return group, pages


def plain_attention(query: Tensor, cache: Tensor, pages: list[int], length: int) -> Tensor:
    """One query [heads, D], position by position: the definition."""
    slots = [pages[i // PAGE] * PAGE + i % PAGE for i in range(length)]
    repeat = query.shape[0] // cache.shape[1]
    keys, values = (part[:, slots].float().repeat_interleave(repeat, 0) for part in cache)
    scores = (keys @ query.float()[:, :, None]).squeeze(-1) * query.shape[-1] ** -0.5
    return (scores.softmax(-1)[:, None] @ values).squeeze(1)
