"""Shares: which outputs, heads or experts' columns each rank of a group computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.part import Part


@dataclass(frozen=True)
class RowRange:
    """A contiguous range of a tensor's rows, or of its columns where a method says so.

    Attributes:
        start, stop: first row, and the row after the last row.
        total: number of rows of the whole tensor.
    """

    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether the range covers all rows."""
        return len(self) == self.total

    def times(self, size: int, offset: int = 0, total: int = 0) -> "RowRange":
        """Return the range of the rows if each row of this range stands for `size` adjacent rows.

        Args:
            offset: number of rows in the tensor before the first of these rows.
            total: number of rows of the whole tensor, if it has further rows.
        """
        return RowRange(offset + self.start * size, offset + self.stop * size, total or self.total * size)


@dataclass(frozen=True)
class Shares:
    """The division of `total` adjacent rows among the ranks.

    Attributes:
        ranges: the range of each rank, in the order of the ranks; together they cover all rows.
        rank: the rank of this process.
    """

    ranges: tuple[RowRange, ...]
    rank: int

    @property
    def own(self) -> RowRange:
        """The range of this rank."""
        return self.ranges[self.rank]

    @property
    def total(self) -> int:
        """Number of rows of all ranks."""
        return self.own.total

    def times(self, size: int) -> "Shares":
        """Return the division if each row stands for `size` adjacent rows."""
        return Shares(tuple(rows.times(size) for rows in self.ranges), self.rank)

    @classmethod
    def split(cls, total: int, ranks: int, rank: int, unit: int = 1) -> "Shares":
        """Divide `total` rows as evenly as blocks of `unit` rows permit; the first ranks get the larger shares.

        The last block may have fewer than `unit` rows. A rank's share may be empty.
        """
        blocks = -(-total // unit)
        bounds = [min((blocks * index + ranks - 1) // ranks * unit, total) for index in range(ranks + 1)]
        return cls(tuple(RowRange(start, stop, total) for start, stop in pairwise(bounds)), rank)


@dataclass(frozen=True)
class HeadShares:
    """The division of an attention layer's heads among the ranks.

    Each rank has whole groups of query heads with their KV heads. If there are more ranks than KV heads, the ranks that
    share a KV head each have a copy of it and a part of its query heads.

    Attributes:
        queries: division of the query heads.
        kv_heads: the KV heads of this rank.
    """

    queries: Shares
    kv_heads: RowRange

    @classmethod
    def split(cls, heads: int, kv_heads: int, ranks: int, rank: int) -> "HeadShares":
        """Divide the heads of a layer among `ranks` ranks.

        Raises:
            ModelFileError: there are more ranks than query heads, so that a rank would have no head.
        """
        if heads % kv_heads:
            raise ModelFileError(f"{heads} query heads cannot share {kv_heads} KV heads")
        group = heads // kv_heads
        if ranks <= kv_heads:
            kv_shares = Shares.split(kv_heads, ranks, rank)
            return cls(kv_shares.times(group), kv_shares.own)
        if ranks > heads:
            raise ModelFileError(f"{heads} attention heads cannot be divided among {ranks} ranks")
        # The ranks are divided among the KV heads. The query heads of a KV head are divided among its ranks.
        ranges: list[RowRange] = []
        own = RowRange(0, 0, kv_heads)
        for head, sharing in enumerate(Shares.split(ranks, kv_heads, 0).ranges):
            if rank in range(sharing.start, sharing.stop):
                own = RowRange(head, head + 1, kv_heads)
            parts = Shares.split(group, len(sharing), 0).ranges
            ranges += [RowRange(head * group + part.start, head * group + part.stop, heads) for part in parts]
        return cls(Shares(tuple(ranges), rank), own)


def row_numbers(ranges: Sequence[RowRange]) -> NDArray[np.int64]:
    """Return the numbers of all rows of `ranges`, in the order of the ranges."""
    return np.concatenate([np.arange(rows.start, rows.stop) for rows in ranges])


def part_of(ranges: Sequence[RowRange], columns: RowRange | None = None) -> Part:
    """Return a part of a tensor that a checkpoint can read.

    Args:
        ranges: ranges of rows; none for all rows.
        columns: range of columns; None for all columns.
    """
    return Part(
        None if all(rows.whole for rows in ranges) else row_numbers(ranges),
        None if columns is None or columns.whole else row_numbers((columns,)),
    )
