"""Tensor parallelism: ranks that compute one model, their shares and exchanges.

Shares are the outputs, heads or experts' columns that each rank (process) of a group computes. The native kernels
exchange results through memory that the ranks of one host share, other kernels through `distributed_exchange`.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from helexa.core.errors import HelexaError, ModelFileError
from helexa.neuron import tensors
from helexa.neuron.ops.kernel_header import EXCHANGE_BYTES, MAX_RANKS, RANK_STATE_BYTES, RANK_TIME_OFFSET
from helexa.neuron.processes.heaps_and_shared_memory import create_shared
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.model_file import Part

_SIZE = RANK_STATE_BYTES + 2 * EXCHANGE_BYTES


@dataclass(frozen=True)
class RankGroup:
    """The place of this process among the ranks that compute one model."""

    rank: int = 0  # number of this process, from 0. Rank 0 schedules and samples.
    count: int = 1  # number of ranks in the group
    # Whether the ranks divide some matrices by columns (row-parallel layers) and add their partial results, which
    # changes the order of additions. If False, the ranks divide all matrices by rows and only gather results.
    adds_results: bool = False


SINGLE = RankGroup()  # A model that one process computes alone


@dataclass(frozen=True)
class RowRange:
    """A contiguous range of a tensor's rows that one rank holds.

    An argument with the name `columns` is a range of columns instead.
    """

    # first row, and the row after the last row
    start: int
    stop: int
    total: int  # number of rows of the whole tensor
    # Number of rows per head if the rows of each head are reordered: first the rows with even numbers, then those with
    # odd numbers. 0 if the rows keep their order.
    head: int = 0
    rotated: int = 0  # number of rows at the start of each head that are reordered; the other rows keep their places

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether the range covers all rows in their order."""
        return len(self) == self.total and not self.head

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of the rows, in the order of the range."""
        numbers = np.arange(self.start, self.stop)
        if not self.head:
            return numbers
        heads = numbers.reshape(-1, self.head)
        pairs = heads[:, : self.rotated].reshape(len(heads), -1, 2).swapaxes(1, 2).reshape(len(heads), -1)
        return np.concatenate((pairs, heads[:, self.rotated :]), axis=1).ravel()

    def halved(self, head: int, rotated: int) -> "RowRange":
        """Return the range with reordered rows in each head of `head` rows.

        Of the first `rotated` rows of a head, the rows with even numbers come first. The other rows keep their places.
        RoPE kernels then find the numbers 2i and 2i + 1 of a pair at i and i + rotated / 2.
        """
        return RowRange(self.start, self.stop, self.total, head, rotated)

    def times(self, size: int, offset: int = 0, total: int = 0) -> "RowRange":
        """Return this range in a larger tensor, which has `size` rows for each row.

        `offset` is the index in the larger tensor at which the rows for row 0 of this range's tensor begin. `total` is
        the number of rows of the larger tensor; 0 means `size` times the rows of this range's tensor.
        """
        start, stop = offset + self.start * size, offset + self.stop * size
        return RowRange(start, stop, total or self.total * size, self.head, self.rotated)


@dataclass(frozen=True)
class Shares:
    """The division of a tensor's rows among the ranks of a group: a range per rank."""

    ranges: tuple[RowRange, ...]  # the range of each rank, in the order of the ranks; together they cover all rows
    rank: int  # the rank of this process

    @property
    def own(self) -> RowRange:
        """The range of this rank."""
        return self.ranges[self.rank]

    @property
    def total(self) -> int:
        """Number of rows of all ranks."""
        return self.own.total

    def times(self, size: int) -> "Shares":
        """Return the division of a tensor that has `size` adjacent rows for each row."""
        return Shares(tuple(rows.times(size) for rows in self.ranges), self.rank)

    @classmethod
    def split(cls, total: int, ranks: int, rank: int, unit: int = 1) -> "Shares":
        """Divide `total` rows as evenly as blocks of `unit` rows permit.

        The first ranks get the larger shares. A rank's share may be empty.
        """
        blocks = -(-total // unit)
        # The last block may have fewer than `unit` rows.
        bounds = [min((blocks * index + ranks - 1) // ranks * unit, total) for index in range(ranks + 1)]
        return cls(tuple(RowRange(start, stop, total) for start, stop in pairwise(bounds)), rank)


@dataclass(frozen=True)
class HeadShares:
    """The division of an attention layer's heads among the ranks.

    Each rank has whole groups of query heads with their KV heads. If there are more ranks than KV heads, the ranks that
    share a KV head each have a copy of it and a part of its query heads.
    """

    queries: Shares  # division of the query heads
    kv_heads: RowRange  # the KV heads of this rank

    @classmethod
    def split(cls, heads: int, kv_heads: int, ranks: int, rank: int) -> "HeadShares":
        """Return the division of a layer's heads among `ranks` ranks, for this `rank`.

        Raises:
            ModelFileError: `heads` is not a multiple of `kv_heads`, or there are more ranks than query heads, so that a
                rank would have no head.
        """
        if heads % kv_heads:
            raise ModelFileError(
                f"{heads} query heads cannot share {kv_heads} KV heads, because {heads} is not a multiple of {kv_heads}"
            )
        group = heads // kv_heads
        if ranks <= kv_heads:
            kv_shares = Shares.split(kv_heads, ranks, rank)
            return cls(kv_shares.times(group), kv_shares.own)
        # Each rank needs at least one query head.
        if ranks > heads:
            raise ModelFileError(
                f"{heads} attention heads cannot be divided among {ranks} ranks", advice="set a smaller tensor_parallel"
            )
        # The ranks are divided among the KV heads. The ranks of a KV head divide its query heads.
        ranges: list[RowRange] = []
        own = RowRange(0, 0, kv_heads)
        for head, sharing in enumerate(Shares.split(ranks, kv_heads, 0).ranges):
            if rank in range(sharing.start, sharing.stop):
                own = RowRange(head, head + 1, kv_heads)
            parts = Shares.split(group, len(sharing), 0).ranges
            ranges += [RowRange(head * group + part.start, head * group + part.stop, heads) for part in parts]
        return cls(Shares(tuple(ranges), rank), own)


def row_numbers(ranges: Sequence[RowRange]) -> NDArray[np.int64]:
    """Return the numbers of all rows of a rank's `ranges`, in their order."""
    return np.concatenate([rows.numbers for rows in ranges])


def part_of(ranges: Sequence[RowRange], columns: RowRange | None = None) -> Part:
    """Return a rank's rows and columns as the part of a tensor to read from a file."""
    return Part(
        None if all(rows.whole for rows in ranges) else row_numbers(ranges),
        None if columns is None or columns.whole else row_numbers((columns,)),
    )


class Exchange(Protocol):
    """The interface of all exchanges between the ranks of a group.

    All ranks must call the methods in the same order and with the same number of rows. An exchange with `memory` does
    not support `stack` and `gather`.
    """

    # uint8, memory that the ranks of one host share, in the layout of `kernels/all_reduce.c`; None if the exchange has
    # no such memory
    memory: Tensor | None

    @property
    def seconds(self) -> float:
        """Time that this rank has spent in exchanges so far, in seconds."""
        ...

    def stack(self, x: Tensor) -> Tensor:
        """Return the tensors x [rows, outputs] of all ranks, [ranks, rows, outputs]."""
        ...

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Return the columns of all ranks, [T, `shares.total`] (see `Ops.gather`)."""
        ...


class SharedMemory:
    """The exchange between ranks in memory that all ranks map.

    The caller may close the descriptor `fd`, which `create` returns, after the construction.
    """

    def __init__(self, fd: int, rank: int) -> None:
        memory = tensors.frombuffer(mmap.mmap(fd, _SIZE), dtype=tensors.uint8)
        self.memory: Tensor | None = memory
        start = rank * RANK_STATE_BYTES // MAX_RANKS + RANK_TIME_OFFSET
        self._nanoseconds = memory[start : start + 8].view(tensors.int64)

    @property
    def seconds(self) -> float:
        """Seconds that this rank has spent in exchanges, mostly waiting for other ranks."""
        return int(self._nanoseconds) / 1e9

    @staticmethod
    def create() -> int:
        """Return a descriptor of new, zeroed shared memory, which the caller must close.

        Raises:
            HelexaError: the system is not Linux. Only Linux has the shared memory that the ranks use.
        """
        if not hasattr(os, "memfd_create"):
            raise HelexaError("tensor parallelism with native kernels requires Linux; set tensor_parallel = 1")
        return create_shared("helexa-ranks", _SIZE)

    def stack(self, x: Tensor) -> Tensor:
        """Raise NotImplementedError: native kernels exchange results without this method."""
        raise NotImplementedError

    def gather(self, x: Tensor, shares: Shares) -> Tensor:
        """Raise NotImplementedError: native kernels exchange results without this method."""
        raise NotImplementedError
