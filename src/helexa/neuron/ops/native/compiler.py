"""Compilation of the C kernels in `kernels/` with the compiler of this machine."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from helexa.core.errors import ConfigError
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.processes import heartbeat

_log = logging.getLogger("helexa.neuron.ops")
_FOLDER = Path(__file__).with_name("kernels")
# With `-ffp-contract=off`, the compiler does not fuse products and sums, so all code paths of a kernel round alike.
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno")
_TIMEOUT_SECONDS = 120
_LAYOUT = ("kernels.h", "tiles.h", "packing.c", "plain.c", "quantize.c")  # define the layout of packed weights


class Unavailable(Exception):
    """The native kernels cannot be used on this machine; the message gives the reason."""


@cache
def native_kernels() -> KernelLibrary:
    """Return the native kernels, compiled for this machine.

    The C sources are compiled if helexa's cache folder has no library for this machine and these sources.

    Raises:
        Unavailable: the machine has no C compiler, or the compilation failed.
    """
    if os.name != "posix":
        raise Unavailable("the native kernels need POSIX threads")
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unavailable("no C compiler found; install gcc or clang for faster answers")
    try:
        library = cache_root(None) / "kernels" / f"{_key(compiler)}.so"
        if not library.exists():
            with _compile_lock(library):
                if not library.exists():
                    _compile(compiler, library)
        return KernelLibrary(ctypes.CDLL(str(library)), layout=_digest(_LAYOUT))
    except subprocess.CalledProcessError as error:
        compiler_output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
        detail = compiler_output.strip().splitlines()[:1]
        raise Unavailable(f"{compiler} failed: {detail[0] if detail else error}") from error
    except (OSError, ConfigError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the native kernels could not be built: {error}") from error


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.[ch]"))


def _digest(names: tuple[str, ...]) -> str:
    return hashlib.sha256(b"\0".join((_FOLDER / name).read_bytes() for name in names)).hexdigest()


def _key(compiler: str) -> str:
    """Return the name of the library file, without suffix: a digest of the C sources, compiler, flags and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_SECONDS).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        processor = platform.processor()
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.read_bytes())
    for item in (version, " ".join(_FLAGS).encode(), processor.encode(), platform.machine().encode()):
        digest.update(b"\0" + item)
    return digest.hexdigest()[:32]


@contextmanager
def _compile_lock(library: Path) -> Iterator[None]:
    """Hold a file lock within the context, so that only one of several starting engines compiles the library."""
    import fcntl

    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, library: Path) -> None:
    """Compile all C sources in parallel, and link them to the file `library`."""
    sources = [source for source in _sources() if source.suffix == ".c"]
    _log.info("compiling the native kernels for this machine")
    with TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as folder:

        def compile_one(source: Path) -> str:
            built = str(Path(folder, source.stem).with_suffix(".o"))
            _run([compiler, *_FLAGS, "-c", str(source), "-o", built])
            heartbeat.beat()
            return built

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, sources))
        partial = Path(folder, library.name)
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(partial), "-lm"])
        partial.replace(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
