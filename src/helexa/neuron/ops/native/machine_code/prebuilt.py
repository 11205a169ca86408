"""Prebuilt libraries of the C kernels in a platform wheel, one per level of processors.

The build hook of the wheel (`hatch_build.py`) also uses this module. The module therefore imports only the standard
library.
"""

import platform
from pathlib import Path
from typing import NamedTuple

LIBRARIES = Path(__file__).with_name("libraries")
_CPU_INFO = Path("/proc/cpuinfo")


class Level(NamedTuple):
    """A set of instructions for which the wheel has a library.

    Attributes:
        name: name of the library file, without suffix.
        machine: machine type, as `platform.machine()` returns it.
        flags: compiler flags that allow the instructions.
        requires: flags in `/proc/cpuinfo` of all processors with these instructions.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    requires: frozenset[str] = frozenset()


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

LEVELS = (
    Level(
        "x86_64_v4_bf16",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        _V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Level("x86_64_v4_vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level("x86_64_v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86_64_v3_vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    Level("x86_64_v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86_64", "x86_64", ("-march=x86-64",)),
    Level("armv8_a", "aarch64", ("-march=armv8-a",)),
)
"""All levels, from the fastest to the slowest of each machine type."""


def prebuilt_library() -> Path | None:
    """Return the fastest prebuilt library that this processor runs; None if the installation has no such library."""
    available = processor_flags()
    for level in LEVELS:
        path = LIBRARIES / f"{level.name}.so"
        if level.machine == platform.machine() and level.requires <= available and path.is_file():
            return path
    return None


def processor_flags() -> set[str]:
    """Return the instruction sets that all cores support, by their names in `/proc/cpuinfo`; empty if unknown."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    # Different cores can have different flags.
    cores = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return set.intersection(*cores) if cores else set()
