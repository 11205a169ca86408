"""The CPUs (hardware threads) that this process may use, and the physical cores to which they belong."""

import os
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")  # the second is the name before Linux 5.3
_MAX_CPUS = 1 << 16


def usable_cpus() -> frozenset[int]:
    """Return the numbers of the CPUs that this process may use, for example within the limits of its container."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: Collection[int] | None = None) -> int:
    """Return the number of physical cores, at least 1, to which `cpus` belong; None for all usable CPUs."""
    import psutil  # not installed with a gateway, which reads the configuration of nodes

    cpus = usable_cpus() if cpus is None else cpus
    # Without Linux's files, only the number of cores of the whole machine is known.
    return max(min(len(cores(cpus)), psutil.cpu_count(logical=False) or len(cpus)), 1)


def cores(cpus: Collection[int], folder: Path = _TOPOLOGY) -> list[tuple[int, ...]]:
    """Divide CPUs into groups that share a physical core, in the order of their lowest numbers.

    Args:
        cpus: numbers of CPUs.
        folder: a folder like Linux's `/sys/devices/system/cpu`. A CPU without files in it is a group of its own.
    """
    groups: dict[frozenset[int], list[int]] = {}
    for cpu in sorted(cpus):
        siblings = next(filter(None, (_read(folder / f"cpu{cpu}/topology/{name}") for name in _SIBLINGS)), "")
        groups.setdefault(parse_cpu_list(siblings) or frozenset([cpu]), []).append(cpu)
    return [tuple(group) for group in groups.values()]


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPU numbers in a list in Linux's format, for example `0-3,8-11`.

    Parts of the text that have another format, and numbers from `_MAX_CPUS` on, are ignored.
    """
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


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
