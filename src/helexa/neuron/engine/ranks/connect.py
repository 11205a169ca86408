"""Chooses how the ranks of a host exchange results."""

from pathlib import Path

from helexa.neuron.ops.native.native import NativeOps
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.ranks.distributed import Distributed
from helexa.neuron.ops.ranks.exchange import Exchange
from helexa.neuron.ops.ranks.rank_group import RankGroup
from helexa.neuron.ops.ranks.shared_memory import SharedMemory


def exchange_for(ops: Ops, group: RankGroup, memory_fd: int, rendezvous: Path, seconds: float) -> Exchange:
    """Return the exchange for these kernels: shared memory for native kernels, else NCCL on CUDA devices, else gloo.

    Waits until all ranks have called this function, if the exchange is NCCL or gloo.

    Args:
        memory_fd: descriptor from `SharedMemory.create`.
        rendezvous: path of a file that does not exist yet, at which the ranks meet.
        seconds: time limit of one exchange.
    """
    if isinstance(ops, NativeOps):
        return SharedMemory(memory_fd, group.rank)
    return Distributed(group, rendezvous, seconds, ops.device)
