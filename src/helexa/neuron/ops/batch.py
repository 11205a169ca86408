"""Input of one forward pass, as tensors that kernels read.

The tokens of all sequences form one flat array [T]: first the spans of one row, then the longer spans. All integers are
int32.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array")


@dataclass(frozen=True)
class Capacity:
    """Largest batch that an engine computes."""

    rows: int
    sequences: int
    pages_per_sequence: int


class Bucket(NamedTuple):
    """Size of a captured graph. Smaller steps are padded to a bucket.

    If `rows` equals `spans`, each span has one row. Otherwise each span has a small, variable number of rows.
    """

    rows: int
    spans: int


class Span(NamedTuple):
    """The rows `start` to `stop` of one sequence, at the positions from `prefix` on.

    Attributes:
        settled: number of leading rows that hold accepted tokens of the sequence. The remaining rows are draft tokens,
            which do not change recurrent state.
        slot: state slot of the sequence, for models with recurrent layers.
    """

    start: int
    stop: int
    prefix: int
    settled: int
    slot: int


@dataclass(frozen=True)
class SpanTable(Generic[Array]):
    """The spans of a batch as arrays. A span that pads a batch to its bucket has no rows.

    Attributes:
        starts: [B + 1], first row of each span, then the end of the last span.
        prefixes: [B], number of positions before the first row of each span.
        settled: [B], see `Span`.
        state_slots: [B], state slot of each span, see `Span.slot`.
        pages: [B, W], numbers of the KV pages that hold the positions of each span; undefined after the last page of
            the span.
    """

    starts: Array
    prefixes: Array
    settled: Array
    state_slots: Array
    pages: Array


@dataclass(frozen=True)
class Batch:
    """Input of one engine step.

    `tokens`, `positions`, `slots` and `sample_rows` are int32 on the device.

    Attributes:
        tokens: [T] token ids.
        positions: [T], or [3, T] for rotary embeddings with several axes.
        slots: [T], KV slot of each row: page * PAGE_SIZE + offset; -1 for padding rows.
        sample_rows: [S + P], rows whose logits are needed, then rows whose hidden states are needed.
        host_spans: spans of the sequences on the host, without padding.
        device_spans: spans of the sequences on the device, with padding; None if the device is the host.
        singles: number of spans of one row.
        most_rows: upper bound of the row counts of all longer spans; 0 if there are no longer spans.
        samples: S, without padding.
        pooled: P.
        capacity: capacity of the buffers that the tensors are views of.
        bucket: bucket of the captured graph that the step is padded to; None if the step runs without a captured graph.
        embeddings: [E, H], inputs of the first layer that replace token embeddings.
        embedding_rows: [E], the rows whose token embeddings are replaced.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    host_spans: SpanTable[NDArray[np.int32]]
    device_spans: SpanTable[Tensor] | None
    singles: int
    most_rows: int
    samples: int
    pooled: int
    capacity: Capacity
    bucket: Bucket | None = None
    embeddings: Tensor | None = None
    embedding_rows: Tensor | None = None

    def take_tokens(self, last: Tensor) -> None:
        """Replace placeholder tokens with the tokens `last` [N] of the previous step (see `overlap.as_after`)."""
        from_last = last[self.tokens.clamp(max=-1)].clamp_(min=0)  # a non-finite row reports token -1
        torch.where(self.tokens < 0, from_last.to(self.tokens.dtype), self.tokens, out=self.tokens)

    @cached_property
    def spans(self) -> SpanTable[Tensor]:
        """Return the span table that kernels read."""
        host = self.host_spans
        tables = (host.starts, host.prefixes, host.settled, host.state_slots, host.pages)
        return self.device_spans or SpanTable(*map(torch.from_numpy, tables))

    @cached_property
    def span_list(self) -> list[Span]:
        """Return the spans one by one, without padding."""
        table = self.host_spans
        columns = (column.tolist() for column in (table.prefixes, table.settled, table.state_slots))
        return [Span(*rows, *fields) for rows, *fields in zip(pairwise(table.starts.tolist()), *columns, strict=True)]
