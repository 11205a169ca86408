"""Kernel libraries compiled for this processor and for processors with fewer instruction sets."""

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from helexa.neuron.ops.native import compilation
from helexa.neuron.ops.native.kernel_library import KernelLibrary, Unavailable, native_kernels
from helexa.neuron.ops.native.native_ops import NativeOps

THREADS = 2


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    """The kernels as compiled for this machine."""
    try:
        return native_kernels()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def native(library: KernelLibrary) -> NativeOps:
    return NativeOps(library, THREADS)


@pytest.fixture(scope="session")
def with_avx2(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The kernels as compiled for processors with AVX2 but not AVX-512."""
    return _compiled("x86_64_v3", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def with_avx_vnni(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The kernels as compiled for processors with AVX2 and AVX-VNNI but not AVX-512."""
    return _compiled("x86_64_v3_vnni", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The kernels as compiled without any instruction set extension."""
    return _compiled("x86_64", tmp_path_factory.getbasetemp())


def _compiled(name: str, folder: Path) -> KernelLibrary:
    """Return the kernels as compiled for the level `name`. The workers of pytest-xdist share the compiled files.

    Args:
        folder: temporary folder of this process; that of a worker is in the folder of all workers of the run.
    """
    (level,) = (level for level in compilation.LEVELS if level.name == name)
    if level.machine != platform.machine() or not level.requires <= compilation.processor_flags():
        pytest.skip(f"this processor is no {name}")
    cc = shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        pytest.skip("no C compiler on this machine: plain torch serves")
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    library = folder / f"kernels-{name}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second worker waits for the first one
        if not library.exists():
            # -O1 compiles in a third of -O3's time. No flag allows different rounding, so the results are the same.
            flags = [flag for flag in compilation.FLAGS if not flag.startswith("-O")]
            sources = [path for path in compilation.sources() if path.suffix == ".c"]
            partial = library.with_suffix(".partial")
            command = [cc, "-O1", "-shared", *level.flags, *flags, *sources, "-o", partial, "-lm"]
            subprocess.run(command, capture_output=True, check=True)
            partial.rename(library)
    return KernelLibrary(ctypes.CDLL(str(library)), layout=name, origin=name)
