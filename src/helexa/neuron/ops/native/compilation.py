"""Compilation of the C kernels, and the prebuilt libraries of a platform wheel.

A wheel has one library per level of processors (see `Level`). Without a prebuilt library, the kernels are compiled on
first use. The build hook of the wheel (`hatch_build.py`) loads this file by its path. The module therefore imports only
the standard library.
"""

import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

_log = logging.getLogger("helexa.neuron.ops")

LIBRARIES = Path(__file__).with_name("libraries")
_CPU_INFO = Path("/proc/cpuinfo")

KERNELS = Path(__file__).with_name("kernels")
# With `-ffp-contract=off`, the compiler does not fuse products and sums, so all code paths of a kernel round alike.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")

THIS_PROCESSOR = ("-march=native",)


class Level(NamedTuple):
    """A processor level: an instruction set for which wheels contain a library."""

    name: str  # name of the library file, without suffix
    machine: str  # machine type, as `platform.machine()` returns it
    flags: tuple[str, ...]  # compiler flags that allow the instructions
    requires: frozenset[str] = frozenset()  # flags in `/proc/cpuinfo` of all processors with these instructions


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_vnni", "avx512_bf16", "avx512vbmi"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi")
# With -march=armv8.2-a, the compiler may use the atomic and rounding instructions of Armv8.1-A.
_V8_2 = frozenset({"asimd", "atomics", "asimdrdm"})
# All levels, from the fastest to the slowest of each machine type.
LEVELS = (
    Level(
        "x86_64_v4_amx",
        "x86_64",
        (*_BF16_FLAGS, "-mamx-tile", "-mamx-int8"),
        _BF16 | {"amx_tile", "amx_int8"},
    ),
    Level("x86_64_v4_bf16", "x86_64", _BF16_FLAGS, _BF16),
    Level("x86_64_v4_vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level("x86_64_v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86_64_v3_vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    Level("x86_64_v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86_64", "x86_64", ("-march=x86-64",)),
    Level(
        "armv8_2_a_i8mm_bf16",
        "aarch64",
        ("-march=armv8.2-a+dotprod+i8mm+bf16",),
        _V8_2 | {"asimddp", "i8mm", "bf16"},
    ),
    Level("armv8_2_a_dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), _V8_2 | {"asimddp"}),
    Level("armv8_a", "aarch64", ("-march=armv8-a",)),
)


def prebuilt_library() -> Path | None:
    """Return the fastest prebuilt library for this processor; None if there is none."""
    available = processor_flags()
    for level in LEVELS:
        path = LIBRARIES / f"{level.name}.so"
        if level.machine == platform.machine() and level.requires <= available and path.is_file():
            return path
    return None


def processor_flags() -> set[str]:
    """Return the flags in `/proc/cpuinfo` that all cores have; empty if unreadable."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    # Different cores can have different flags.
    cores = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return set.intersection(*cores) if cores else set()


def sources() -> list[Path]:
    """Return the C files and headers of the kernels."""
    return sorted(KERNELS.glob("*.[ch]"))


def compile_library(
    compiler: Sequence[str],
    target_flags: Sequence[str],
    library: Path,
    compiled: Callable[[], None] = lambda: None,
    file_seconds: float | None = None,
) -> None:
    """Compile all C files in parallel, and link them to the file `library`.

    Args:
        compiler: command of the C compiler, without arguments for the kernels.
        target_flags: flags that choose the processor.
        library: path of the result, in an existing folder. The file appears only when it is complete.
        compiled: function that is called after each compiled file, in one of several threads.
        file_seconds: maximum duration of the compiler for one file in seconds. None means no limit.

    Raises:
        subprocess.CalledProcessError: the compiler failed; `stderr` has its messages.
        OSError: the compiler could not be started, or a file could not be written.
        subprocess.TimeoutExpired: the compiler took more than `file_seconds` for one file.
    """
    with TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as folder:

        def compile_one(source: Path) -> str:
            built = str(Path(folder, source.stem).with_suffix(".o"))
            _run([*compiler, *FLAGS, *target_flags, "-c", str(source), "-o", built], file_seconds)
            compiled()
            return built

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, (path for path in sources() if path.suffix == ".c")))
        partial = Path(folder, library.name)
        _run([*compiler, "-shared", "-pthread", *objects, "-o", str(partial), "-lm"], file_seconds)
        partial.replace(library)


def compile_for_this_processor(compiler: str, library: Path, compiled: Callable[[], None], file_seconds: float) -> None:
    """Compile `library` for this processor, or for its fastest `Level` that compiles.

    The arguments and errors are those of `compile_library`.
    """
    available = processor_flags()
    levels = [level for level in LEVELS if level.machine == platform.machine() and level.requires <= available]
    first_error: subprocess.CalledProcessError | None = None
    # `-march=native` fails if the assembler is older than the compiler (RHEL 9), or if the compiler does not know
    # `native` (RISC-V). The levels of this processor are tried next, and finally no flags.
    for flags in (THIS_PROCESSOR, *(level.flags for level in levels), ()):
        try:
            compile_library([compiler], flags, library, compiled, file_seconds)
        except subprocess.CalledProcessError as error:
            first_error = first_error or error
            continue
        if first_error is not None:
            _log.warning(
                "kernels do not use all instructions of this processor compiler=%r flags=%r; "
                "upgrade the compiler and its assembler for faster answers",
                compiler,
                " ".join(flags),
            )
        return
    assert first_error is not None
    raise first_error


def _run(command: list[str], seconds: float | None) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds)


def c_compiler() -> str | None:
    """Return the path of `CC` (cc if unset), else of gcc or clang; None without any."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")


def why_unavailable() -> str | None:
    """Return why native kernels cannot be used, and what to install, or None.

    None means that a prebuilt library or a compiler exists (neither is tried), or that the system is not POSIX.
    """
    if os.name != "posix" or prebuilt_library() is not None or c_compiler() is not None:
        return None
    return "no prebuilt kernels and no C compiler; install gcc or clang, or helexa's wheel with prebuilt kernels"
