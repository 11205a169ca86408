"""The ranks that compute one model together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankGroup:
    """The position of this process among the processes (ranks) that compute one model together.

    Attributes:
        rank: number of this process, from 0. Rank 0 schedules and samples.
        count: number of ranks.
        sums: whether the ranks divide some matrices by columns and add their partial results, which changes the order
            of additions. If False, the ranks divide all matrices by rows and only gather results.
    """

    rank: int = 0
    count: int = 1
    sums: bool = False


SINGLE = RankGroup()
"""A model that one process computes alone."""
