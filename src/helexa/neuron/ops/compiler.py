"""Compiles `kernels.c` for this machine with the host's C compiler, once, and loads it. No compiler, no kernels."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

from helexa.core.errors import ConfigError
from helexa.neuron.sources.cache import cache_root

_log = logging.getLogger("helexa.neuron.ops")
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno")
_TIMEOUT_SECONDS = 60


def native_kernels() -> ctypes.CDLL | None:
    """The compiled kernels, from the cache if they were compiled for this machine before; None when that fails."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _log.info("no C compiler found; plain torch runs instead of the native kernels, slower")
        return None
    flags = (*_FLAGS, *(("-fopenmp",) if _shares_openmp() else ()))
    try:
        library = cache_root(None) / "kernels" / f"{_key(compiler, flags)}.so"
        if not library.exists():
            _compile(compiler, flags, library)
        return ctypes.CDLL(str(library))
    except (OSError, ConfigError, subprocess.SubprocessError) as error:
        detail = error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning("the native kernels could not be built; plain torch runs instead, slower: %s", detail)
        return None


def _shares_openmp() -> bool:
    """Whether our kernels would use the OpenMP runtime that torch has loaded: a second one would fight with it."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    runtimes = {name for line in lines if "omp" in (name := line.rpartition("/")[2]) and ".so" in name}
    return runtimes == {"libgomp.so.1"}


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """A name that changes with the source, the compiler and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_SECONDS).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        processor = platform.processor()
    digest = hashlib.sha256(_SOURCE.read_bytes())
    for part in (version, " ".join(flags).encode(), processor.encode(), platform.machine().encode()):
        digest.update(b"\0" + part)
    return digest.hexdigest()[:32]


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *flags, str(_SOURCE), "-o", str(partial), "-lm"]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
    partial.replace(library)
