"""Selection of the library of C kernels: prebuilt, or compiled here."""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helexa.core.errors import ConfigError
from helexa.neuron import tensors
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.ops.native.compilation import FLAGS, KERNELS, c_compiler, compile_library, prebuilt_library, sources
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.processes import heartbeat

_log = logging.getLogger("helexa.neuron.ops")
# These files define the layout of packed weights.
_LAYOUT = ("kernels.h", "tiles.h", "packing.c", "codebooks.h", "codebooks.c", "plain.c", "quantize.c")
_THIS_PROCESSOR = ("-march=native",)
_COMPILER_SECONDS = 600.0  # per file; a small processor beside other programs needs minutes


class Unavailable(Exception):
    """The native kernels cannot be used on this machine; the message gives the reason."""


@tensors.cached()
def native_kernels() -> KernelLibrary:
    """Return the native kernels, prebuilt or else compiled for this machine.

    Raises:
        Unavailable: the installation has no prebuilt kernels for this machine, and the machine has no C compiler or the
            compilation failed.
    """
    if os.name != "posix":
        raise Unavailable("the native kernels need POSIX threads")
    if (path := prebuilt_library()) is not None:
        try:
            return KernelLibrary(ctypes.CDLL(str(path)), _digest(_LAYOUT), f"prebuilt for {path.stem}")
        except OSError as error:
            _log.warning("the prebuilt kernels cannot be loaded, compiling them: %s", error)
    compiler = c_compiler()
    if compiler is None:
        raise Unavailable("no C compiler found; install gcc or clang for faster answers")
    try:
        library = cache_root(None) / "kernels" / f"{_key(compiler)}.so"
        if not library.exists():
            # Several engines may start at once. Only one of them compiles.
            with _compile_lock(library):
                if not library.exists():
                    _log.info("compiling the native kernels for this machine")
                    compile_library([compiler], _THIS_PROCESSOR, library, heartbeat.beat, _COMPILER_SECONDS)
        return KernelLibrary(ctypes.CDLL(str(library)), _digest(_LAYOUT), "compiled for this machine")
    except subprocess.CalledProcessError as error:
        compiler_output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
        detail = compiler_output.strip().splitlines()[:1]
        raise Unavailable(f"{compiler} failed: {detail[0] if detail else error}") from error
    except (OSError, ConfigError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the native kernels could not be built: {error}") from error


def _digest(names: tuple[str, ...]) -> str:
    return hashlib.sha256(b"\0".join((KERNELS / name).read_bytes() for name in names)).hexdigest()


def _key(compiler: str) -> str:
    """Return a library's name: a digest of sources, compiler, flags and processor."""
    # The compiler is not run, because its start delays each start of an engine. An upgrade replaces its file.
    program = Path(compiler).resolve()
    properties = program.stat()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        processor = platform.processor()
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.read_bytes())
    for item in (
        f"{program} {properties.st_size} {properties.st_mtime_ns}".encode(),
        " ".join((*FLAGS, *_THIS_PROCESSOR)).encode(),
        processor.encode(),
        platform.machine().encode(),
    ):
        digest.update(b"\0" + item)
    return digest.hexdigest()[:32]


@contextmanager
def _compile_lock(library: Path) -> Iterator[None]:
    """Hold a file lock, so that only one of several engines compiles the library."""
    import fcntl

    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
