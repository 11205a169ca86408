"""Memory that the ranks of one host share, through which the native kernels exchange results."""

import mmap
import os

import torch
from torch import Tensor

from helexa.core.errors import HelexaError
from helexa.neuron.ops.constants import EXCHANGE_BYTES, MAX_RANKS, RANK_STATE_BYTES, RANK_TIME_OFFSET
from helexa.neuron.ops.ranks.shares import Shares

_SIZE = RANK_STATE_BYTES + 2 * EXCHANGE_BYTES


class SharedMemory:
    """The exchange of the native kernels: memory of which each rank maps the same pages.

    Args:
        fd: descriptor of the memory, from `create`; the caller may close it afterwards.
        rank: number of this rank.
    """

    def __init__(self, fd: int, rank: int) -> None:
        memory = torch.frombuffer(mmap.mmap(fd, _SIZE), dtype=torch.uint8)
        self.memory: Tensor | None = memory
        start = rank * RANK_STATE_BYTES // MAX_RANKS + RANK_TIME_OFFSET
        self._nanoseconds = memory[start : start + 8].view(torch.int64)

    @property
    def seconds(self) -> float:
        """Time that this rank has spent in exchanges so far, mostly waiting for other ranks."""
        return int(self._nanoseconds) / 1e9

    @staticmethod
    def create() -> int:
        """Return a descriptor of new, zeroed shared memory.

        Raises:
            HelexaError: the system has no anonymous shared memory (`memfd_create`).
        """
        if not hasattr(os, "memfd_create"):
            raise HelexaError("tensor parallelism with native kernels requires Linux")
        fd = os.memfd_create("helexa-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, _SIZE)
        return fd

    def stack(self, x: Tensor) -> Tensor:
        """Raise NotImplementedError: the native kernels exchange results themselves."""
        raise NotImplementedError

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Raise NotImplementedError: the native kernels exchange results themselves."""
        raise NotImplementedError
