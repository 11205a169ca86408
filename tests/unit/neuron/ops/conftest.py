"""Kernel libraries compiled for this processor and for processors with fewer instruction sets."""

import ctypes
import fcntl
import hashlib
import platform
import shutil
import subprocess

import pytest
import torch

import packages
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
def with_avx2() -> KernelLibrary:
    """The kernels as compiled for processors with AVX2 but not AVX-512."""
    return _compiled("x86_64_v3")


@pytest.fixture(scope="session")
def with_avx_vnni() -> KernelLibrary:
    """The kernels as compiled for processors with AVX2 and AVX-VNNI but not AVX-512."""
    return _compiled("x86_64_v3_vnni")


@pytest.fixture(scope="session")
def portable() -> KernelLibrary:
    """The kernels as compiled without any instruction set extension."""
    return _compiled("x86_64")


def _compiled(name: str) -> KernelLibrary:
    """Return the kernels as compiled for the level `name`, cached until a source, a flag or the compiler changes."""
    (level,) = (level for level in compilation.LEVELS if level.name == name)
    if level.machine != platform.machine() or not level.requires <= compilation.processor_flags():
        pytest.skip(f"this processor is no {name}")
    cc = shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        pytest.skip("no C compiler on this machine: plain torch serves")
    # -O1 compiles in a third of -O3's time. No flag allows different rounding, so the results are the same.
    command = [cc, "-O1", "-shared", *level.flags, *(flag for flag in compilation.FLAGS if not flag.startswith("-O"))]
    version = subprocess.run([cc, "--version"], capture_output=True, check=True).stdout
    inputs = [version, *(argument.encode() for argument in command)]
    inputs += [path.read_bytes() for path in compilation.sources()]
    folder = packages.CACHE / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}-{hashlib.sha256(bytes(1).join(inputs)).hexdigest()[:32]}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest-xdist waits for the first one
        if not library.exists():
            for earlier in folder.glob(f"{name}-*"):
                earlier.unlink()
            partial = library.with_suffix(".partial")
            sources = [path for path in compilation.sources() if path.suffix == ".c"]
            subprocess.run([*command, *sources, "-o", partial, "-lm"], capture_output=True, check=True)
            partial.rename(library)
        return KernelLibrary(ctypes.CDLL(str(library)), layout=name, origin=name)
