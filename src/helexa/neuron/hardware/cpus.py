"""The CPUs, NUMA nodes and control groups that this process may use."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

FOLDER = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")

_TOPOLOGY = Path("/sys/devices/system/cpu")
# File with the list of the CPUs of one core. The second name is that of Linux before 5.3.
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")
_MAX_CPUS = 1 << 16

# For tests: environment variable with the path of a folder to read instead of `/sys/devices/system/node`.
NUMA_FOLDER = "NEURON_DEBUG_NUMA"

_FOLDER = Path("/sys/devices/system/node")
_MEMORY = re.compile(r"MemTotal:\s*(\d+) kB")


def control_groups(controller: str, folder: Path = FOLDER, own_groups: Path = OWN_GROUPS) -> list[Path]:
    """Return the folders of this process's control groups, the innermost first.

    Version 2 of control groups has one hierarchy of groups, and version 1 has a hierarchy for each controller. A
    system may have both.

    Args:
        controller: the limited resource: `cpu` or `memory`.
        own_groups: a file like `/proc/self/cgroup`. In a container, the file may name groups that do not exist in
            `folder`. The container's own group is then the root folder of the hierarchy, which is always returned.
    """
    groups: list[Path] = []
    for line in text_of(own_groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = folder / controller if controllers else folder
        group = root / path.strip("/")
        groups += [parent for parent in (group, *group.parents) if parent.is_relative_to(root)]
    return groups


def text_of(path: Path) -> str:
    """Return the stripped text of a file about CPUs or control groups, or ""."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def usable_cpus() -> frozenset[int]:
    """Return the numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: Collection[int] | None = None) -> int:
    """Return the number of cores of `cpus` (None: of all usable CPUs), at least 1."""
    cpus = usable_cpus() if cpus is None else cpus
    if any((_TOPOLOGY / f"cpu{cpu}/topology").is_dir() for cpu in cpus):
        return len(cores(cpus))
    import psutil  # imported only here: gateways import this module, too, and may be installed without psutil

    # Without Linux's files, only the number of cores of the whole machine is known.
    return max(min(len(cpus), psutil.cpu_count(logical=False) or len(cpus)), 1)


def cpu_limit(folder: Path = FOLDER, own_groups: Path = OWN_GROUPS) -> float | None:
    """Return how many CPUs' time this process may use; None without a limit.

    The lowest limit of the process's control groups applies. The arguments are those of `control_groups`.
    """
    limits: list[float] = []
    for group in control_groups("cpu", folder, own_groups):
        # `cpu.max` exists in version 2 of control groups, the other two files in version 1.
        first_version = f"{text_of(group / 'cpu.cfs_quota_us')} {text_of(group / 'cpu.cfs_period_us')}"
        quota, _, period = (text_of(group / "cpu.max") or first_version).partition(" ")
        if quota.isdecimal() and period.isdecimal():  # without a limit, the quota is `max` or -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def cores(cpus: Collection[int], folder: Path = _TOPOLOGY) -> list[tuple[int, ...]]:
    """Return the CPUs of each physical core, sorted by each core's lowest CPU number."""
    # A CPU without files in the folder is a group of its own.
    groups: dict[frozenset[int], list[int]] = {}
    for cpu in sorted(cpus):
        siblings = next(filter(None, (text_of(folder / f"cpu{cpu}/topology/{name}") for name in _SIBLINGS)), "")
        groups.setdefault(parse_cpu_list(siblings) or frozenset([cpu]), []).append(cpu)
    return [tuple(group) for group in groups.values()]


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPU numbers in a list in Linux's format, for example `0-3,8-11`."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cpus.update(range(int(first), min(int(last or first) + 1, _MAX_CPUS)))
    return frozenset(cpus)


def cpu_list(cpus: Iterable[int]) -> str:
    """Return CPU numbers as a list in Linux's format, for example `0-3,8-11`."""
    numbers = sorted(cpus)
    firsts = numbers[:1] + [number for before, number in pairwise(numbers) if number != before + 1]
    lasts = [before for before, number in pairwise(numbers) if number != before + 1] + numbers[-1:]
    return ",".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    )


@dataclass(frozen=True)
class CpuNode:
    """A NUMA node whose CPUs this process may use."""

    number: int  # number of the NUMA node in the operating system
    cpus: tuple[int, ...]
    memory_mb: int  # memory of the NUMA node in MiB; 0 if unknown
    # Relative access time from this node's CPUs to the memory of each NUMA node, by the number of that NUMA node. For
    # this node's own memory, the value is 10.
    distances: Mapping[int, int]


def numa_nodes(usable: Collection[int] | None = None, folder: Path | None = None) -> list[CpuNode]:
    """Return the NUMA nodes with CPUs that this process may use, by number.

    NUMA nodes without such a CPU, for example NUMA nodes that have only memory, are left out. The list is empty if the
    operating system reports no NUMA nodes.

    Args:
        usable: numbers of the CPUs that this process may use; None to ask the operating system.
        folder: a folder like Linux's `/sys/devices/system/node`; None for this folder, or the folder that the
            environment variable `NEURON_DEBUG_NUMA` names.
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
