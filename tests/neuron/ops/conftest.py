"""The kernels that are compiled for this processor."""

import pytest
import torch

from helexa.neuron.ops.compiler import Unavailable, native_kernels
from helexa.neuron.ops.kernel_library import KernelLibrary
from helexa.neuron.ops.native import NativeOps

THREADS = 2


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    """The kernels that this machine would use."""
    try:
        return native_kernels()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def native(library: KernelLibrary) -> NativeOps:
    return NativeOps(library, THREADS)
