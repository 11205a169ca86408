"""The layout for kernels that read tables: all numbers of a step in one piece, which one copy takes to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.engine.batch import PAGE_SIZE, Batch, Capacity, Rows, Tables
from helexa.neuron.engine.plan import Plan

_ALIGNED = 16  # numbers: every part begins at a multiple, so that kernels may read several at once
_NOWHERE = -1  # the slot of a row that stands for nothing


class PackedLayout:
    """Lays plans out as int32, in host memory that the device copies from while the host goes on.

    Where each part lies follows from how many rows, samples, spans and pages a step has, so steps of the same shape
    find theirs where it was.

    Args:
        buckets: rows of recorded steps, ascending; a step in which every sequence advances by one token is filled up to
            the next of them, with rows that stand for nothing, and has a table of pages of the full width.
    """

    def __init__(self, capacity: Capacity, device: torch.device, buckets: Sequence[int] = ()) -> None:
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
        count = len(rows.spans)
        alone = count == len(rows.tokens) == len(rows.sample_rows) and not rows.pooled
        bucket = next((bucket for bucket in self.buckets if bucket >= count), 0) if alone else 0
        return self._lay(rows, bucket)

    def blank(self, bucket: int) -> Batch:
        """A step of as many rows as a bucket has, none of which stands for anything."""
        return self._lay(Rows([], [], [], [], 0, []), bucket)

    def _lay(self, rows: Rows, bucket: int) -> Batch:
        spans, capacity = rows.spans, self._capacity
        lengths = [span.rows.stop - span.rows.start for span in spans]
        singles = bucket or lengths.count(1)
        width = _rounded(capacity.pages_per_sequence if bucket else max(len(span.pages) for span in spans))
        starts = [span.rows.start for span in spans]
        end = spans[-1].rows.stop if spans else 0
        copy = _Copy(self._next_host(), self._device)
        tokens = copy.part(rows.tokens, bucket)
        positions = copy.part(rows.positions, bucket)
        slots = copy.part(rows.slots, bucket, _NOWHERE)
        sample_rows = copy.part(rows.sample_rows, bucket)
        tables = Tables(
            starts=copy.part([*starts, end], bucket and bucket + 1, end),
            prefixes=copy.part([span.prefix for span in spans], bucket),
            settled=copy.part([span.settled for span in spans], bucket),
            state_slots=copy.part([span.slot for span in spans], bucket),
            pages=copy.table([span.pages for span in spans], bucket or len(spans), width),
            singles=singles,
            longest_single=(
                capacity.pages_per_sequence * PAGE_SIZE
                if bucket
                else max((span.prefix + 1 for span in spans[:singles]), default=0)
            ),
            most_rows=0 if bucket else max(lengths[singles:], default=0),
        )
        copy.send()
        if self._copied:
            self._copied[self._turn].record()
        return Batch(tokens, positions, slots, sample_rows, rows.pooled, spans, capacity, bucket, tables)

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
        """Where these values will lie on the device, followed by fillers up to a size."""
        start, count = self._end, len(values)
        size = max(size, count)
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


def buckets(most: int) -> list[int]:
    """Sizes of recorded steps of up to so many rows: few that are far apart by much of their size."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, most, 32)]
    return [size for size in sizes if size < most] + [most]
