"""Chooses the batch sizes (buckets) for which graphs are captured, and the bucket to which a step is padded."""

from collections.abc import Sequence

from helexa.neuron.ops.batch import Bucket
from helexa.neuron.ops.constants import MAX_DRAFTS

_MOST_DRAFTING = 4  # maximum number of sequences in a captured graph with drafts

MAX_DRAFT_ROWS = 1 + MAX_DRAFTS
"""Maximum number of rows (tokens) of a sequence in a step with drafts."""


def buckets(most: int, drafting: int = 0) -> list[Bucket]:
    """Return the batch sizes for which graphs are captured, in ascending order. Sizes for steps with drafts come last.

    Args:
        most: maximum number of sequences in a decode step without drafts.
        drafting: maximum number of sequences in a decode step with drafts; 0 for no sizes with drafts.
    """
    sizes = [size for size in (1, 2, 4, *range(8, 128, 8), *range(128, most, 32)) if size < most] + [most]
    drafting = min(drafting, most, _MOST_DRAFTING)
    draft_rows = [rows for rows in (8, 16, 32) if drafting < rows < drafting * MAX_DRAFT_ROWS] + [
        drafting * MAX_DRAFT_ROWS
    ] * bool(drafting)
    return [Bucket(size, size) for size in sizes] + [Bucket(rows, drafting) for rows in draft_rows]


def fitting(rows: int, spans: int, longest: int, among: Sequence[Bucket]) -> Bucket | None:
    """Return the first bucket that is large enough for a step, or None if every bucket is too small.

    Args:
        rows, spans: number of rows (tokens) and of spans (sequences) of the step.
        longest: number of rows of the longest span of the step.
        among: the available buckets in order of preference.
    """
    for bucket in among:
        max_span_rows = 1 if bucket.rows == bucket.spans else MAX_DRAFT_ROWS
        if longest <= max_span_rows and spans <= bucket.spans and rows <= bucket.rows:
            return bucket
    return None
