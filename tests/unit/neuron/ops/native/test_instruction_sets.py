"""Kernels compiled for older processors are as accurate, and their rows as independent of the batch."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from helexa.neuron.ops.batch import AttentionKind, Capacity
from helexa.neuron.ops.expert_routing_and_mixture import Clamp, Routing
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import MIXED
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.reference.reference_ops import GATES
from neuron.ops import float64, paging, random_weights
from neuron.ops.test_mixture import ALIKE, experts, inputs, near
from neuron.ops.test_quantize import holds
from neuron.weights.quantization_cases import heavy_tailed
from neuron.weights.test_gguf_blocks import decode_random

CODEBOOKS = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
"""Types whose weights are indexes into a codebook."""
PAGES = 20
KINDS = [AttentionKind(0.125), AttentionKind(0.2, window=150, sinks=torch.linspace(-3, 3, 6), cap=1.5)]
SMALL_SIGNAL_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from helexa.neuron.ops.native.kernel_library import native_kernels
print(native_kernels().use_amx(True))
"""
"""A program whose signal stack has no space for the registers of AMX."""


@pytest.fixture
def with_amx(library: KernelLibrary) -> Iterator[KernelLibrary]:
    """The kernels as compiled for this machine, if they use AMX."""
    if not library.use_amx(True):
        pytest.skip("this processor has no AMX, or the compiler or the system does not know it")
    yield library
    library.use_amx(True)


def products_hold(library: KernelLibrary, name: str, bits: int) -> None:
    """Assert that a product is accurate and that its rows do not depend on the number of rows."""
    ops, x = NativeOps(library, 2, x_bits=bits), torch.randn(17, 512) ** 3  # with outliers
    weight = decode_random(name, 50, 2) if name in CODEBOOKS else random_weights.make(name, 50, 512)
    x[3] = 1.0
    matrix, tokens = ops.matrix(weight), torch.arange(50, dtype=torch.int32)
    assert torch.equal(ops.embedding(matrix, tokens).double(), random_weights.plain(weight))
    linear, expected = ops.linear([matrix], None), float64.product(x, weight, bits)
    together = linear(x)
    assert ((together - expected.exact).abs() <= expected.tolerance).all()
    assert ((together - expected.unrounded).abs() <= expected.rounding + expected.tolerance).all()
    for rows in (1, 2, 3, 5, 7, 8, 9, 14, 16):
        assert torch.equal(linear(x[:rows]), together[:rows])


def attention_holds(library: KernelLibrary, bits: int, kind: AttentionKind) -> None:
    """Assert that the last of 700 positions gets equal results alone and at the end of a chunk."""
    ops, length, pages = NativeOps(library, 2, bits), 700, torch.randperm(PAGES).tolist()
    keys, values, queries = torch.randn(length, 2, 64), torch.randn(length, 2, 64), torch.randn(30, 6, 64)
    cache = ops.new_cache(2, PAGES, 64)
    paging.store(ops, cache, keys, values, paging.slots_of(pages, length))
    outs: list[torch.Tensor] = []
    for count in (1, 2, 30):
        batch = paging.batch_of([paging.entry(0, length - count, count, pages[:11])], Capacity(64, 4, PAGES))
        rows = paging.queries_for(queries[-count:], bits)
        fresh = NativeOps(library, 2, bits)
        outs.append(fresh.run(lambda batch: fresh.attend(rows, cache, batch, kind), batch).clone())  # noqa: B023
    expected, size = paging.attention(queries[-1], cache, paging.slots_of(pages, length), bits, kind)
    rounding = 0.01 * float(size.max()) if bits == 8 else 0.0  # of weights to bytes
    assert ((outs[0][0] - expected).abs() <= 2.0**-8 * size + rounding + 1e-6).all()
    assert all(torch.equal(out[-1], outs[0][0]) for out in outs[1:])


def mixture_holds(library: KernelLibrary) -> None:
    """Assert that a mixture of experts is as accurate as its experts one by one."""
    ops, routing, clamp = NativeOps(library, 2), Routing(4, "shares"), Clamp(1.702, 0.5)
    layer_experts = experts(ops, ALIKE, biased=True)
    x, scores = inputs()
    near(
        ops.mixture(layer_experts, routing, clamp)(x, scores),
        Ops.mixture(ops, layer_experts, routing, clamp)(x, scores),
    )


def norm_and_activation_hold(library: KernelLibrary) -> None:
    ops, x, weight = NativeOps(library, 2), torch.randn(3, 64), torch.randn(64)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(ops.rms_norm(weight, 1e-5)(x.clone()), expected)
    gate, up = (x * 10).chunk(2, 1)
    for name, activation in GATES.items():
        expected = activation(gate.double()).float() * up
        torch.testing.assert_close(ops.gate_mul(x * 10, name), expected, rtol=2e-5, atol=1e-14)


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize("name", [*random_weights.ALL, *CODEBOOKS])
def test_products_with_avx2_match_float64_within_rounding(with_avx2: KernelLibrary, name: str, bits: int) -> None:
    products_hold(with_avx2, name, bits)


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize("name", random_weights.ALL)
def test_products_with_avx_vnni_match_float64_within_rounding(
    with_avx_vnni: KernelLibrary, name: str, bits: int
) -> None:
    products_hold(with_avx_vnni, name, bits)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_avx2_matches_float64_within_rounding(
    with_avx2: KernelLibrary, bits: int, kind: AttentionKind
) -> None:
    attention_holds(with_avx2, bits, kind)


def test_norm_and_activation_with_avx2_match_their_definitions(with_avx2: KernelLibrary) -> None:
    norm_and_activation_hold(with_avx2)


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize("name", ["Q5_1", "Q8_0", "Q6_K", "Q2_K", "Q3_K", "MXFP4", random_weights.PLAIN, *CODEBOOKS])
def test_products_of_portable_kernels_match_float64_within_rounding(
    portable: KernelLibrary, name: str, bits: int
) -> None:
    products_hold(portable, name, bits)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_portable_kernels_matches_float64_within_rounding(
    portable: KernelLibrary, bits: int, kind: AttentionKind
) -> None:
    attention_holds(portable, bits, kind)


def test_norm_and_activation_of_portable_kernels_match_their_definitions(portable: KernelLibrary) -> None:
    norm_and_activation_hold(portable)


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q4k", "q6k"])
def test_quantization_with_avx2_matches_torch(with_avx2: KernelLibrary, name: str) -> None:
    holds(NativeOps(with_avx2, 2), heavy_tailed(50, 512), name)


@pytest.mark.parametrize("name", ["q5_0", "q5k", "q6k"])
def test_quantization_of_portable_kernels_matches_torch(portable: KernelLibrary, name: str) -> None:
    holds(NativeOps(portable, 2), heavy_tailed(50, 512).half(), name)


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_products_with_avx2_and_with_avx_vnni_are_equal(
    with_avx2: KernelLibrary, with_avx_vnni: KernelLibrary, name: str, bits: int
) -> None:
    weight, x = random_weights.make(name, 50, 512), torch.randn(17, 512) ** 3  # with outliers
    x[:, 7] *= 40
    first, second = (NativeOps(library, 2, x_bits=bits) for library in (with_avx2, with_avx_vnni))
    assert torch.equal(first.linear([first.matrix(weight)], None)(x), second.linear([second.matrix(weight)], None)(x))


def test_mixture_of_experts_with_avx2_matches_a_computation_expert_by_expert(with_avx2: KernelLibrary) -> None:
    mixture_holds(with_avx2)


def test_mixture_of_experts_with_avx_vnni_matches_a_computation_expert_by_expert(with_avx_vnni: KernelLibrary) -> None:
    mixture_holds(with_avx_vnni)


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize("name", [*random_weights.ALL, *CODEBOOKS])
def test_products_with_and_without_amx_are_equal(with_amx: KernelLibrary, name: str, bits: int) -> None:
    weight = decode_random(name, 50, 2) if name in CODEBOOKS else random_weights.make(name, 50, 512)
    ops, x = NativeOps(with_amx, 2, x_bits=bits), torch.randn(117, 512) ** 3  # with outliers
    x[:, 7] *= 40
    linear = ops.linear([ops.matrix(weight)], torch.randn(50))
    for rows in (31, 32, 33, 47, 48, 80, 96, 117):  # 80 and 96: the last item is full
        assert with_amx.use_amx(True)
        expected = linear(x[:rows]).clone()
        assert not with_amx.use_amx(False)
        assert torch.equal(linear(x[:rows]), expected)


def test_kernels_do_not_use_amx_if_the_operating_system_refuses_it(with_amx: KernelLibrary) -> None:
    command = [sys.executable, "-c", SMALL_SIGNAL_STACK]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == "False"
