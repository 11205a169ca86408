"""The ranks that compute one model together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankGroup:
    """The position of this process among the processes (ranks) that compute one model together.

    Attributes:
        rank: number of this process, from 0. Rank 0 schedules and samples.
        count: number of ranks.
    """

    rank: int = 0
    count: int = 1


SINGLE = RankGroup()
"""A model that one process computes alone."""
