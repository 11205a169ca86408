"""The exchange through `torch.distributed`: gloo for CPUs."""

import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from helexa.neuron.ops.ranks.rank_group import RankGroup
from helexa.neuron.ops.ranks.shares import Shares


class Distributed:
    """The exchange of kernels without shared memory.

    Args:
        rendezvous: path of a file that does not exist yet, which all ranks of the host can write.
        seconds: time limit of one exchange.
    """

    memory: Tensor | None = None
    seconds = 0.0

    def __init__(self, group: RankGroup, rendezvous: Path, seconds: float) -> None:
        store = FileStore(str(rendezvous), group.count)
        # Not torch's default group, which a process can create only once.
        self._group = ProcessGroupGloo(store, group.rank, group.count, timedelta(seconds=seconds))

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`], from this rank's columns x [T, own columns]."""
        begin = time.perf_counter()
        widest = max(map(len, shares.ranges))
        padded = torch.zeros(x.shape[0], widest, dtype=x.dtype)
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in shares.ranges]
        self._group.allgather([parts], [padded]).wait()  # pyright: ignore[reportAttributeAccessIssue]
        self.seconds += time.perf_counter() - begin
        return torch.cat([part[:, : len(rows)] for part, rows in zip(parts, shares.ranges, strict=True)], dim=1)
