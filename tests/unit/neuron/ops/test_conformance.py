"""The reference operations and the native kernels pass the conformance tests."""

import pytest
import torch

from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from neuron.ops.conformance import CacheConformance, Conformance
from neuron.ops.paging import CPU


class TestReference(Conformance):
    @pytest.fixture
    def ops(self) -> Ops:
        return ReferenceOps(CPU, torch.float32)


@pytest.fixture(params=["library", "with_avx2", "portable"])
def built(request: pytest.FixtureRequest) -> KernelLibrary:
    """The kernels compiled for this machine and for older processors."""
    return request.getfixturevalue(request.param)


class TestNative(Conformance):
    tolerance = 2e-2  # products with plain weights round activations to bfloat16
    cache_tolerance = 2e-2

    @pytest.fixture
    def ops(self, built: KernelLibrary) -> Ops:
        return NativeOps(built, 2, x_bits=16)


class TestNativeInBytes(CacheConformance):
    cache_tolerance = 4e-2

    @pytest.fixture
    def ops(self, built: KernelLibrary) -> Ops:
        return NativeOps(built, 2, kv_bits=8, x_bits=16)
