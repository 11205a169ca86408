"""Binds each rank on CPUs to the CPUs of its part of the NUMA nodes.

Linux places a page of memory on the NUMA node of the CPU that first writes to the page. The weights and the KV cache of
a bound rank are therefore in the memory that is local to its CPUs.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.hardware.cores import cores, cpu_list, parse_cpu_list, usable_cpus
from helexa.neuron.hardware.numa import CpuNode, numa_nodes

RANK_CPUS = "HELEXA_RANK_CPUS"
"""The environment variable in which rank 0 tells the other ranks which CPUs all ranks may use together.

The processes of the other ranks inherit the binding of rank 0, so they cannot find out from the operating system.
"""

_log = logging.getLogger("helexa.neuron.engine")
_THREADS = Path("/proc/self/task")

ItemT = TypeVar("ItemT")


def bind(options: EngineOptions, rank: int) -> None:
    """Bind all threads of this process to the CPUs of the rank (see `cpus_for`).

    If the operating system refuses, the process logs a warning and runs on all CPUs.
    """
    cpus = cpus_for(options, rank)
    if not cpus:
        return
    os.environ.setdefault(RANK_CPUS, cpu_list(usable_cpus()))
    try:
        for thread in _THREADS.iterdir():
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(thread.name), cpus)
    except OSError as error:
        _log.warning("could not bind rank=%d cpus=%s: %s", rank, cpu_list(cpus), error.strerror)
        return
    nodes = [str(node.number) for node in numa_nodes(cpus)]
    _log.info("bound rank=%d numa_node=%s cpus=%s", rank, ",".join(nodes), cpu_list(cpus))


def cpus_for(options: EngineOptions, rank: int) -> tuple[int, ...]:
    """Return the CPUs of a rank of an engine.

    Returns:
        An empty tuple if the rank is not bound: the engine has one rank or uses no CPUs, or there is one NUMA node.
    """
    if options.device != "cpu" or options.tensor_parallel == 1:
        return ()
    shared = os.environ.get(RANK_CPUS)
    usable = usable_cpus() if shared is None else parse_cpu_list(shared)
    return divide(numa_nodes(usable), rank, options.tensor_parallel)


def divide(nodes: Sequence[CpuNode], rank: int, ranks: int) -> tuple[int, ...]:
    """Return the CPUs of a rank if the NUMA nodes are divided among `ranks` ranks; empty if there is only one node.

    Each rank gets adjacent NUMA nodes. If there are more ranks than NUMA nodes, adjacent ranks share a NUMA node and
    divide its physical cores.
    """
    if len(nodes) < 2:
        return ()
    own = _part(nodes, rank, ranks)
    sharing = [other for other in range(ranks) if _part(nodes, other, ranks) == own]
    own_cores = cores([cpu for node in own for cpu in node.cpus])
    return tuple(sorted(cpu for core in _part(own_cores, sharing.index(rank), len(sharing)) for cpu in core))


def _part(items: Sequence[ItemT], index: int, parts: int) -> Sequence[ItemT]:
    """Return part `index` of `items`, which are divided into contiguous parts with at least one item each."""
    start = index * len(items) // parts
    return items[start : max(start + 1, (index + 1) * len(items) // parts)]
