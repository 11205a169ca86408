"""Sizes of recorded steps."""

from collections.abc import Sequence

from helexa.neuron.ops.batch import Bucket
from helexa.neuron.ops.constants import MAX_DRAFTS

_MOST_DRAFTING = 4  # sequences in a recorded step with drafts

FEW = 1 + MAX_DRAFTS
"""Rows of a span that has drafts, at most."""


def buckets(most: int, drafting: int = 0) -> list[Bucket]:
    """Sizes of recorded steps, the smallest first.

    Args:
        most: sequences that advance by a token each.
        drafting: sequences that may have drafts instead.
    """
    sizes = [size for size in (1, 2, 4, *range(8, 128, 8), *range(128, most, 32)) if size < most] + [most]
    drafting = min(drafting, most, _MOST_DRAFTING)
    drafted = [rows for rows in (8, 16, 32) if drafting < rows < drafting * FEW] + [drafting * FEW] * bool(drafting)
    return [Bucket(size, size) for size in sizes] + [Bucket(rows, drafting) for rows in drafted]


def fitting(rows: int, spans: int, longest: int, among: Sequence[Bucket]) -> Bucket | None:
    """The first bucket that a step can be padded to, if there is one.

    Args:
        longest: rows of its longest span.
    """
    for bucket in among:
        most = 1 if bucket.rows == bucket.spans else FEW
        if longest <= most and spans <= bucket.spans and rows <= bucket.rows:
            return bucket
    return None
