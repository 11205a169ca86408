"""The input of one forward pass, as tensors that kernels read.

Tokens of all sequences lie flat, [T]: first those of spans of one row, then those of longer spans. All numbers are
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
    """The largest batch that an engine ever computes."""

    rows: int
    sequences: int
    pages_per_sequence: int


class Bucket(NamedTuple):
    """The size of a recorded step, which smaller steps are padded to.

    Where there are as many rows as spans, each span has one row; else a span has any number of rows up to a few.
    """

    rows: int
    spans: int


class Span(NamedTuple):
    """The rows `start` to `stop` of one sequence, at its positions `prefix` and following.

    Attributes:
        settled: so many of the first rows are the sequence's own; those behind them are drafts, which leave no trace in
            recurrent state.
        slot: of the sequence's recurrent state, where the model has such.
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
        starts: [B + 1], each span's first row, and the end of the last one.
        prefixes: [B], positions before its first row.
        settled: [B], see `Span`.
        state_slots: [B], see `Span`.
        pages: [B, W], the numbers of the pages that hold its positions; undefined behind its last page.
    """

    starts: Array
    prefixes: Array
    settled: Array
    state_slots: Array
    pages: Array


@dataclass(frozen=True)
class Batch:
    """One step.

    `tokens`, `positions`, `slots` and `sample_rows` are int32 on the device.

    Attributes:
        tokens: [T] token ids.
        positions: [T], or [3, T] for rotary embeddings of several axes.
        slots: [T], where its K and V go: page * PAGE_SIZE + offset; -1 for a row that pads the batch to its bucket.
        sample_rows: [S + P], rows whose logits are needed, then rows whose hidden states are.
        host_spans: where the sequences' rows lie, without padding.
        device_spans: the same on the device, with padding; None where that is the host.
        singles: spans of one row.
        most_rows: an upper bound of the rows of the other spans; 0 if there is none.
        samples: S, padding left out.
        pooled: P.
        capacity: of the buffers that the tensors are views of.
        bucket: of the recorded step that this one is padded to; None for a step of a shape of its own.
        embeddings: [E, H], inputs of the first layer that replace the embeddings of tokens.
        embedding_rows: [E], the rows that they replace.
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
        """Put the tokens [N] of the step before in the places that stand for them (see `overlap.as_after`)."""
        from_last = last[self.tokens.clamp(max=-1)].clamp_(min=0)  # a row of no numbers must not ask for a token -1
        torch.where(self.tokens < 0, from_last.to(self.tokens.dtype), self.tokens, out=self.tokens)

    @cached_property
    def spans(self) -> SpanTable[Tensor]:
        """Where the sequences' rows lie, for kernels."""
        host = self.host_spans
        parts = (host.starts, host.prefixes, host.settled, host.state_slots, host.pages)
        return self.device_spans or SpanTable(*map(torch.from_numpy, parts))

    @cached_property
    def span_list(self) -> list[Span]:
        """The spans one by one, padding left out."""
        table = self.host_spans
        columns = (part.tolist() for part in (table.prefixes, table.settled, table.state_slots))
        return [Span(*rows, *rest) for rows, *rest in zip(pairwise(table.starts.tolist()), *columns, strict=True)]
