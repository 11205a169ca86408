"""The layout for kernels that read tables: all numbers of a step in one piece, which one copy takes to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.engine.layout import Rows
from helexa.neuron.engine.plan import Plan
from helexa.neuron.ops.batch import Batch, Bucket, Capacity, Tables
from helexa.neuron.ops.constants import MAX_DRAFTS

_ALIGNED = 16  # numbers: every part begins at a multiple, so that kernels may read several at once
_NOWHERE = -1  # the slot of a row that stands for nothing
_MOST_DRAFTING = 4  # sequences in a recorded step with drafts

FEW = 1 + MAX_DRAFTS
"""Rows of a span that has drafts, at most."""


class PackedLayout:
    """Lays plans out as int32, in host memory that the device copies from while the host goes on.

    Where each part lies follows from how many rows, samples, spans and pages a step has, so steps of the same shape
    find theirs where it was.

    Args:
        buckets: of recorded steps, as `buckets` has them; a step is filled up to the first that it fits into, with rows
            that stand for nothing, and has a table of pages of the full width.
    """

    def __init__(self, capacity: Capacity, device: torch.device, buckets: Sequence[Bucket] = ()) -> None:
        self.buckets = buckets
        self._capacity = capacity
        spans = capacity.sequences
        parts = (*[capacity.rows] * 4, *[spans + 1] * 4, spans * _rounded(capacity.pages_per_sequence))
        size = sum(_rounded(part) for part in parts)
        cuda = device.type == "cuda"
        # Two, as the device may still copy from one while the other is filled.
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if cuda else []
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._turn = 0

    def lay_out(self, plan: Plan) -> Batch:
        """The batch of a plan; it is good until the next one is laid out."""
        rows = Rows.of(plan)
        longest = max(span.rows.stop - span.rows.start for span in rows.spans)
        fitting = (bucket for bucket in self.buckets if _fits(rows, longest, bucket))
        return self._lay(rows, None if rows.pooled else next(fitting, None))

    def blank(self, bucket: Bucket) -> Batch:
        """A step of a bucket's size, in which nothing stands for anything."""
        return self._lay(Rows([], [], [], [], 0, []), bucket)

    def _lay(self, rows: Rows, bucket: Bucket | None) -> Batch:
        spans, capacity = rows.spans, self._capacity
        if bucket is None:
            size = Bucket(len(rows.tokens), len(spans))
            lengths = [span.rows.stop - span.rows.start for span in spans]
            singles, width = lengths.count(1), max(len(span.pages) for span in spans)
            most_rows = max(lengths[singles:], default=0)
        else:
            size, width = bucket, capacity.pages_per_sequence
            singles = bucket.spans if bucket.rows == bucket.spans else 0
            most_rows = 0 if singles else FEW
        samples = len(rows.sample_rows) if bucket is None else bucket.rows
        starts = [span.rows.start for span in spans]
        end = spans[-1].rows.stop if spans else 0
        copy = _Copy(self._next_host(), self._device)
        tokens = copy.part(rows.tokens, size.rows)
        positions = copy.part(rows.positions, size.rows)
        slots = copy.part(rows.slots, size.rows, _NOWHERE)
        sample_rows = copy.part(rows.sample_rows, samples)
        tables = Tables(
            starts=copy.part([*starts, end], size.spans + 1, end),
            prefixes=copy.part([span.prefix for span in spans], size.spans),
            settled=copy.part([span.settled for span in spans], size.spans),
            state_slots=copy.part([span.slot for span in spans], size.spans),
            pages=copy.table([span.pages for span in spans], size.spans, _rounded(width)),
            singles=singles,
            most_rows=most_rows,
        )
        copy.send()
        if self._copied:
            self._copied[self._turn].record()
        wanted = len(rows.sample_rows)
        return Batch(tokens, positions, slots, sample_rows, rows.pooled, spans, capacity, wanted, bucket, tables)

    def _next_host(self) -> Tensor:
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._hosts[self._turn]


class _Copy:
    """Parts one behind the other, at the same places here and there."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self._host, self._device = host, device
        self._numbers = host.numpy()
        self._end = 0

    def part(self, values: Sequence[int], size: int, filler: int = 0) -> Tensor:
        """Where these values will lie on the device, followed by fillers if they are fewer than `size`."""
        start, count = self._end, len(values)
        self._end += _rounded(size)
        self._numbers[start : start + count] = values
        self._numbers[start + count : start + size] = filler
        return self._device[start : start + size]

    def table(self, lines: Sequence[Sequence[int]], count: int, width: int) -> Tensor:
        """The same for lines of a table; what is behind their values is of no account."""
        start = self._end
        self._end += count * width
        for place, line in enumerate(lines):
            self._numbers[start + place * width : start + place * width + len(line)] = line
        return self._device[start : self._end].view(count, width)

    def send(self) -> None:
        """Copy all of it, in one piece."""
        self._device[: self._end].copy_(self._host[: self._end], non_blocking=True)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


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


def _fits(rows: Rows, longest: int, bucket: Bucket) -> bool:
    """Whether a step, the longest of whose spans has so many rows, can be filled up to a bucket."""
    most = 1 if bucket.rows == bucket.spans else FEW
    return longest <= most and len(rows.spans) <= bucket.spans and len(rows.tokens) <= bucket.rows
