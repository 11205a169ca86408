"""A folder with the layout of Linux's `/sys/devices/system/node`, for machines with other NUMA nodes than this one."""

import os
from collections.abc import Mapping
from pathlib import Path


def numa_folder(folder: Path, cpus: Mapping[int, str], memory_mb: int = 4096) -> Path:
    """Write a folder with NUMA nodes, each with the distance 10 to itself and 21 to others.

    Args:
        folder: the folder to fill.
        cpus: CPUs of each NUMA node in Linux's list format, by the number of the NUMA node.
        memory_mb: memory of each NUMA node in MiB.
    """
    for number, listed in cpus.items():
        node = folder / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{listed}\n")
        (node / "meminfo").write_text(f"Node {number} MemTotal:  {memory_mb << 10} kB\nNode {number} MemFree: 1 kB\n")
        (node / "distance").write_text(" ".join("10" if other == number else "21" for other in cpus) + "\n")
    (folder / "online").write_text("all\n")
    return folder


def two_nodes_of_this_machine(folder: Path) -> tuple[Path, list[set[int]]]:
    """Write a folder with two NUMA nodes, between which the CPUs of this process are divided.

    Returns:
        The folder, and the CPUs of each NUMA node.
    """
    usable = sorted(os.sched_getaffinity(0))
    halves = [usable[: len(usable) // 2], usable[len(usable) // 2 :]]
    lists = {number: ",".join(map(str, half)) for number, half in enumerate(halves)}
    return numa_folder(folder, lists), [set(half) for half in halves]
