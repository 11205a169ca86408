"""The input of one forward pass, as tensors that kernels read.

Tokens of all sequences lie flat, [T]: first sequences that advance by one token, then those that advance by more.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Capacity:
    """The largest batch that an engine ever lays out."""

    rows: int
    sequences: int
    pages_per_sequence: int


class Span(NamedTuple):
    """Rows of one sequence, at positions `prefix` and following.

    Attributes:
        pages: hold everything up to the last of them.
        slot: of the sequence's recurrent state, where the model has such.
        settled: so many of the first rows are the sequence's own; those behind them are drafts, which leave no trace in
            the state.
    """

    rows: slice
    prefix: int
    pages: list[int]
    slot: int
    settled: int


@dataclass(frozen=True)
class DecodeGroup:
    """Rows with one query each, of similar length.

    Attributes:
        rows: where they lie in the flat batch.
        pages: [B, P] page numbers; short rows repeat a page of their own, masked.
        lengths: [B] positions of each row, its own included.
        longest: the largest of them.
        contiguous: first page when B is 1 and its pages ascend without a gap, so that no gather is needed.
    """

    rows: slice
    pages: Tensor
    lengths: Tensor
    longest: int
    contiguous: int | None

    @cached_property
    def mask(self) -> Tensor:
        """[B, longest], additive: 0, or -inf beyond a row's length."""
        beyond = torch.arange(self.longest, device=self.lengths.device) >= self.lengths[:, None]
        return torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, float("-inf"))


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence that attend to their prefix and to each other.

    Attributes:
        pages: [P] page numbers of everything computed so far and of the chunk itself.
        contiguous: first page when they ascend without a gap.
    """

    rows: slice
    prefix: int
    pages: Tensor
    contiguous: int | None


@dataclass(frozen=True)
class Tables:
    """Where the spans of a batch lie, as kernels of a GPU read it: int32, on the device.

    A row that stands for nothing, as it fills a batch up to the size of a recorded one, has the slot -1 in
    `Batch.slots`: nothing is stored for it. A span that stands for nothing has no rows.

    Attributes:
        pages: [B, P] page numbers of each span; what lies behind its own is not to be read.
        starts: [B + 1], each span's first row in the flat batch, and the end of the last one.
        prefixes: [B] positions before its first row.
        settled: [B] rows that are its own and no drafts.
        state_slots: [B] of its recurrent state.
        singles: spans of one row; they come first.
        most_rows: an upper bound of the rows of any other span; 0 if there is none.
    """

    pages: Tensor
    starts: Tensor
    prefixes: Tensor
    settled: Tensor
    state_slots: Tensor
    singles: int
    most_rows: int


class Bucket(NamedTuple):
    """The size of recorded steps: of so many rows in so many spans, as many or fewer of which stand for something.

    Where there are as many of both, each span has one row; else it may have any few of them.
    """

    rows: int
    spans: int


@dataclass(frozen=True)
class Batch:
    """One step.

    `tokens`, `positions`, `slots` and `sample_rows` are int32 on the device.

    Attributes:
        tokens: [T] token ids.
        positions: [T] position of each token in its sequence.
        slots: [T] where its K and V go: page * PAGE_SIZE + offset.
        sample_rows: [S] rows whose logits are needed, in plan order; behind them [P] rows that are pooled or scored.
        pooled: P.
        spans: the sequences' rows; those of one row come first, the shortest first.
        capacity: of the buffers that the tensors are views of.
        samples: rows whose logits are needed, and those that are pooled or scored.
        bucket: of a recorded step that this one is filled up to; `spans` has only those that stand for something, and
            `samples` counts only such. None for a step of a shape of its own.
        laid: the tables, if they lie on the device already.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    pooled: int
    spans: list[Span]
    capacity: Capacity
    samples: int = 0
    bucket: Bucket | None = None
    laid: Tables | None = None

    def take_tokens(self, last: Tensor) -> None:
        """Put the tokens [N] of the step before in the places that stand for them (see `overlap.as_after`)."""
        from_last = last[self.tokens.clamp(max=-1)].clamp_(min=0)  # a row of no numbers must not ask for a token -1
        torch.where(self.tokens < 0, from_last.to(self.tokens.dtype), self.tokens, out=self.tokens)

    @cached_property
    def tables(self) -> Tables:
        """The same as `spans`, on the device."""
        if self.laid is not None:
            return self.laid
        width = max(len(span.pages) for span in self.spans)
        lengths = [span.rows.stop - span.rows.start for span in self.spans]
        singles = lengths.count(1)

        def on_device(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.tokens.device)

        return Tables(
            pages=on_device([span.pages + [0] * (width - len(span.pages)) for span in self.spans]),
            starts=on_device([span.rows.start for span in self.spans] + [self.spans[-1].rows.stop]),
            prefixes=on_device([span.prefix for span in self.spans]),
            settled=on_device([span.settled for span in self.spans]),
            state_slots=on_device([span.slot for span in self.spans]),
            singles=singles,
            most_rows=max(lengths[singles:], default=0),
        )

    @cached_property
    def decodes(self) -> list[DecodeGroup]:
        """Spans of one row, in groups in which padding at most doubles the pages read."""
        groups: list[list[Span]] = []
        for span in self.spans:
            if span.rows.stop - span.rows.start > 1:
                break
            if groups and len(span.pages) <= 2 * len(groups[-1][0].pages):
                groups[-1].append(span)
            else:
                groups.append([span])
        return [_decode_group(group, self.tokens.device) for group in groups]

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Spans of several rows."""
        device = self.tokens.device
        return [
            Chunk(span.rows, span.prefix, torch.tensor(span.pages, device=device), _first_if_contiguous(span.pages))
            for span in self.spans
            if span.rows.stop - span.rows.start > 1
        ]


def _decode_group(group: list[Span], device: torch.device) -> DecodeGroup:
    width = max(len(span.pages) for span in group)
    pages = [span.pages + span.pages[:1] * (width - len(span.pages)) for span in group]
    lengths = [span.prefix + 1 for span in group]
    return DecodeGroup(
        rows=slice(group[0].rows.start, group[-1].rows.stop),
        pages=torch.tensor(pages, device=device),
        lengths=torch.tensor(lengths, device=device),
        longest=max(lengths),
        contiguous=_first_if_contiguous(pages[0]) if len(group) == 1 else None,
    )


def _first_if_contiguous(pages: list[int]) -> int | None:
    return pages[0] if pages[-1] - pages[0] == len(pages) - 1 and pages == sorted(pages) else None
