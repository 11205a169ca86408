"""The NUMA nodes of this machine: groups of CPUs, each with memory that is local to them."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from helexa.neuron.hardware.cores import parse_cpu_list, usable_cpus

NUMA_FOLDER = "NEURON_DEBUG_NUMA"
"""The environment variable that names a folder to read instead of `/sys/devices/system/node`, for tests."""

_FOLDER = Path("/sys/devices/system/node")
_MEMORY = re.compile(r"MemTotal:\s*(\d+) kB")


@dataclass(frozen=True)
class CpuNode:
    """A NUMA node whose CPUs this process may use.

    Attributes:
        number: number of the NUMA node in the operating system.
        cpus: numbers of those of its CPUs that this process may use, in ascending order.
        memory_mb: memory of the NUMA node in MiB; 0 if unknown.
        distances: relative access time of its CPUs to the memory of each NUMA node, by the number of the NUMA node. Its
            own memory has 10.
    """

    number: int
    cpus: tuple[int, ...]
    memory_mb: int
    distances: Mapping[int, int]


def numa_nodes(usable: Collection[int] | None = None, folder: Path | None = None) -> list[CpuNode]:
    """Return the NUMA nodes whose CPUs this process may use, in the order of their numbers.

    NUMA nodes without such a CPU, for example NUMA nodes that have only memory, are left out. The list is empty if the
    operating system reports no NUMA nodes.

    Args:
        usable: numbers of the CPUs that this process may use; None to ask the operating system.
        folder: a folder like Linux's `/sys/devices/system/node`; None for this folder, or the folder that the
            environment variable `NUMA_FOLDER` names.
    """
    usable = usable_cpus() if usable is None else usable
    folder = folder or Path(os.environ.get(NUMA_FOLDER) or _FOLDER)
    numbers = sorted(int(path.name[4:]) for path in folder.glob("node*") if path.name[4:].isdecimal())
    nodes: list[CpuNode] = []
    for number in numbers:
        cpus = parse_cpu_list(_read(folder / f"node{number}/cpulist")).intersection(usable)
        memory = _MEMORY.search(_read(folder / f"node{number}/meminfo"))
        distances = [int(text) for text in _read(folder / f"node{number}/distance").split() if text.isdecimal()]
        if cpus:
            nodes.append(
                CpuNode(
                    number,
                    tuple(sorted(cpus)),
                    int(memory[1]) >> 10 if memory else 0,
                    dict(zip(numbers, distances, strict=False)),  # a missing file gives no distances
                )
            )
    return nodes


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
