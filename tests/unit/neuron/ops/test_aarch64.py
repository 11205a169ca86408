"""Kernels for aarch64, in an emulator, are as accurate as the kernels for this machine."""

import pytest

from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.constants import MIXED
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native import NativeOps
from neuron.ops import random_weights
from neuron.ops.emulated_library import EmulatedLibrary
from neuron.ops.test_instruction_sets import KINDS, attention_holds, norm_and_activation_hold, products_hold
from neuron.ops.test_quantize import holds
from neuron.weights.quantization_cases import heavy_tailed

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    return EmulatedLibrary(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize("name", random_weights.ALL)
def test_products(emulated: KernelLibrary, name: str, bits: int) -> None:
    products_hold(emulated, name, bits)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(emulated: KernelLibrary, bits: int, kind: AttentionKind) -> None:
    attention_holds(emulated, bits, kind)


def test_norm_and_activation(emulated: KernelLibrary) -> None:
    norm_and_activation_hold(emulated)


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q5_0", "q4k", "q5k", "q6k"])
def test_quantization(emulated: KernelLibrary, name: str) -> None:
    holds(NativeOps(emulated, 2), heavy_tailed(50, 512), name)
