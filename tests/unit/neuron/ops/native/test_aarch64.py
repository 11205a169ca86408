"""Kernels for aarch64, in an emulator, are as accurate as the kernels for this machine."""

from pathlib import Path

import pytest

from helexa.neuron.ops.batch import AttentionKind
from helexa.neuron.ops.kernel_header import MIXED
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native_ops import NativeOps
from neuron.ops import random_weights
from neuron.ops.conformance import Conformance
from neuron.ops.native.emulated_library import PROCESSORS, EmulatedLibrary, compile_emulated
from neuron.ops.native.test_instruction_sets import (
    CODEBOOKS,
    KINDS,
    attention_holds,
    norm_and_activation_hold,
    products_hold,
)
from neuron.ops.test_quantize import holds
from neuron.weights.quantization_cases import heavy_tailed

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module", params=PROCESSORS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(level: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    compile_emulated(folder, level)
    return folder


@pytest.fixture
def emulated(folder: Path, level: str) -> KernelLibrary:
    return EmulatedLibrary(folder, PROCESSORS[level])


@pytest.mark.parametrize("bits", [16, 8, MIXED])
@pytest.mark.parametrize("name", [*random_weights.ALL, *CODEBOOKS])
def test_products_of_emulated_arm_kernels_match_float64_within_rounding(
    emulated: KernelLibrary, name: str, bits: int
) -> None:
    products_hold(emulated, name, bits)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_emulated_arm_kernels_matches_float64_within_rounding(
    emulated: KernelLibrary, bits: int, kind: AttentionKind
) -> None:
    attention_holds(emulated, bits, kind)


def test_norm_and_activation_of_emulated_arm_kernels_match_their_definitions(emulated: KernelLibrary) -> None:
    norm_and_activation_hold(emulated)


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q5_0", "q4k", "q5k", "q6k"])
def test_quantization_of_emulated_arm_kernels_matches_torch(emulated: KernelLibrary, name: str) -> None:
    holds(NativeOps(emulated, 2), heavy_tailed(50, 512), name)


@pytest.mark.parametrize("value_dim", [64, 48])
def test_delta_rule_of_emulated_arm_kernels_equals_plain_torch(emulated: KernelLibrary, value_dim: int) -> None:
    Conformance().test_delta_rule_equals_plain_torch(NativeOps(emulated, 2), value_dim)


def test_delta_rule_states_of_two_sequences_are_independent(emulated: KernelLibrary) -> None:
    Conformance().test_delta_rule_states_of_two_sequences_are_independent(NativeOps(emulated, 2))
