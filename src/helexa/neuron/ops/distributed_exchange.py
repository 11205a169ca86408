"""The exchange through `torch.distributed`: gloo for CPUs, NCCL for CUDA devices."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from helexa.neuron.ops.rank_group_and_shares import RankGroup, Shares


class Distributed:
    """The exchange between ranks whose kernels do not use shared memory.

    The constructor waits until all ranks of the group have called it.

    Args:
        rendezvous: path of a file through which the ranks find each other. The file must not exist yet, and all ranks
            must be able to write it.
        seconds: time limit of the constructor and of one exchange. Exchanges in a CUDA graph have no limit.
    """

    memory: Tensor | None = None
    seconds = 0.0

    def __init__(self, group: RankGroup, rendezvous: Path, seconds: float, device: torch.device) -> None:
        self._count = group.count
        store = c10d.FileStore(str(rendezvous), group.count)
        store.set_timeout(timedelta(seconds=seconds))
        # torch's default process group is not used, because a process can create it only once.
        self._group = _process_group(store, group, timedelta(seconds=seconds), device)
        self._options = c10d.AllgatherOptions()
        # NCCL runs a synchronous operation on the current stream, which the capture of a CUDA graph records.
        self._options.asyncOp = False
        if device.type == "cuda":
            # NCCL must create the communicator before an exchange can be captured as a CUDA graph.
            self.stack(torch.zeros(1, 1, device=device))  # creates the communicator
            torch.cuda.synchronize(device)

    def stack(self, x: Tensor) -> Tensor:
        """Return the tensors x [rows, outputs] of all ranks, [ranks, rows, outputs]."""
        begin = time.perf_counter()
        stacked = x.new_empty(self._count, *x.shape)
        if x.shape[0]:
            self._group._allgather_base(stacked.flatten(0, 1), x.contiguous(), self._options).wait()
        self.seconds += time.perf_counter() - begin
        return stacked

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`]; x has this rank's columns."""
        widths = [len(columns) for columns in shares.ranges]
        missing = max(widths) - x.shape[1]
        stacked = self.stack(F.pad(x, (0, missing)) if missing else x)
        return torch.cat([part[:, :width] for part, width in zip(stacked, widths, strict=True)], dim=1)


def _process_group(store: c10d.Store, group: RankGroup, timeout: timedelta, device: torch.device) -> Any:
    if device.type != "cuda":
        return c10d.ProcessGroupGloo(store, group.rank, group.count, timeout)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, group.rank, group.count, options)
