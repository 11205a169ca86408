"""The Triton operations pass the conformance tests."""

import pytest
import torch

from helexa.neuron.ops.gpu.gpu import GpuOps
from helexa.neuron.ops.protocol import Ops
from neuron.ops.conformance import CacheConformance, Conformance
from neuron.ops.paging import CPU


class TestTriton(Conformance):
    tolerance = 1e-3  # scales of two levels are merged into one float16
    cache_tolerance = 1e-4

    @pytest.fixture
    def ops(self) -> Ops:
        return GpuOps(CPU, torch.float32)


class TestTritonInBytes(CacheConformance):
    cache_tolerance = 4e-2

    @pytest.fixture
    def ops(self) -> Ops:
        return GpuOps(CPU, torch.float32, kv_bits=8)
