"""Number of threads of each rank, and the binding of ranks to CPUs of NUMA nodes.

Linux places a page of memory on the NUMA node of the CPU that first writes to the page. The weights and the KV cache of
a bound rank are therefore in the memory that is local to its CPUs.
"""

import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from helexa.core.logs import quoted
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.hardware.cpus import (
    CpuNode,
    cores,
    cpu_limit,
    cpu_list,
    numa_nodes,
    parse_cpu_list,
    physical_cores,
    usable_cpus,
)

# The environment variable in which rank 0 tells the other ranks which CPUs all ranks may use together. The processes of
# the other ranks inherit the binding of rank 0, so the operating system cannot tell them these CPUs.
RANK_CPUS = "HELEXA_RANK_CPUS"

_MOST_UNEQUAL = 2  # maximum ratio of the numbers of CPUs of two ranks; if it is exceeded, no rank is bound

_log = logging.getLogger("helexa.neuron.engine")
_THREADS = Path("/proc/self/task")

ItemT = TypeVar("ItemT")


def bind(options: EngineOptions, rank: int) -> None:
    """Bind all threads of this process to the CPUs of the rank (see `cpus_for`)."""
    cpus = cpus_for(options, rank)
    if not cpus:
        return
    # The other ranks inherit the binding of this process, so they read from this variable which CPUs all ranks may use.
    os.environ.setdefault(RANK_CPUS, cpu_list(usable_cpus()))
    try:
        # `sched_setaffinity` binds one thread, and libraries may have started others.
        for thread in _THREADS.iterdir():
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(thread.name), cpus)
    except OSError as error:
        # Without the binding, the rank works, but reads the memory of other NUMA nodes.
        _log.warning(
            "rank not bound to its CPUs rank=%d cpus=%s error=%s; answers may be slower",
            rank,
            cpu_list(cpus),
            quoted(error),
        )
        return
    nodes = [str(node.number) for node in numa_nodes(cpus)]
    _log.info("bound rank=%d numa_node=%s cpus=%s", rank, ",".join(nodes), cpu_list(cpus))


def cpus_for(options: EngineOptions, rank: int) -> tuple[int, ...]:
    """Return the CPUs of a rank of an engine; empty if the rank is not bound to CPUs."""
    # A single rank uses all CPUs, and ranks on GPUs do not compute on CPUs.
    if options.device != "cpu" or options.tensor_parallel == 1:
        return ()
    shared = os.environ.get(RANK_CPUS)
    usable = usable_cpus() if shared is None else parse_cpu_list(shared)
    nodes, ranks = numa_nodes(usable), range(options.tensor_parallel)
    parts = [divide(nodes, other, len(ranks)) for other in ranks]
    # A container may have few CPUs of a node. All ranks would wait for the rank with these CPUs, because each rank
    # computes an equal part of the model.
    if min(map(len, parts)) * _MOST_UNEQUAL < max(map(len, parts)):
        return ()
    return parts[rank]


def threads_of_rank(options: EngineOptions, rank: int) -> int:
    """Return the number of CPU threads of a rank: by default one per physical core."""
    if options.threads:
        return options.threads
    # A rank that is bound to CPUs uses their cores. Otherwise the ranks share all cores evenly.
    own = cpus_for(options, rank)
    threads = physical_cores(own) if own else physical_cores() // options.tensor_parallel
    # More threads than the CPU limit of a container would be slower, because the operating system stops all threads of
    # a container that has used up its CPU time.
    limit = cpu_limit()
    if limit is not None:
        threads = min(threads, math.ceil(limit / options.tensor_parallel))
    return max(threads, 1)


def divide(nodes: Sequence[CpuNode], rank: int, ranks: int) -> tuple[int, ...]:
    """Return the CPUs of a rank; empty if there is only one NUMA node."""
    if len(nodes) < 2:
        return ()
    # Each rank gets adjacent NUMA nodes. If there are more ranks than nodes, several ranks share a node and divide its
    # cores.
    own = _part(nodes, rank, ranks)
    sharing = [other for other in range(ranks) if _part(nodes, other, ranks) == own]
    own_cores = cores([cpu for node in own for cpu in node.cpus])
    return tuple(sorted(cpu for core in _part(own_cores, sharing.index(rank), len(sharing)) for cpu in core))


def _part(items: Sequence[ItemT], index: int, parts: int) -> Sequence[ItemT]:
    """Return contiguous part `index` of `parts` parts, with at least one item."""
    start = index * len(items) // parts
    return items[start : max(start + 1, (index + 1) * len(items) // parts)]
