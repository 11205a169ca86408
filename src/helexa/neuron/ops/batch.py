"""Input of one forward pass, as tensors that kernels read.

A row is one token of the batch. A span is the rows of one sequence: one row in plain decode, several rows in prefill or
with draft tokens. The rows of all spans form one flat array [T], first the spans of one row, then the longer spans. All
integers are int32.
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
    """Size of the largest batch that an engine computes.

    Attributes:
        rows: maximum number of rows (tokens).
        sequences: maximum number of sequences.
        pages_per_sequence: maximum number of KV pages of a sequence.
    """

    rows: int
    sequences: int
    pages_per_sequence: int


class Bucket(NamedTuple):
    """Batch size of a captured graph. A smaller batch is padded to the bucket's size.

    If `rows` equals `spans`, each span (sequence) has one row. Otherwise a span can have more rows, with draft tokens.

    Attributes:
        rows: number of rows (tokens), with padding.
        spans: number of spans (sequences), with padding.
    """

    rows: int
    spans: int


class Span(NamedTuple):
    """The rows (tokens) of one sequence in a batch.

    Attributes:
        start: index of the first row in the batch.
        stop: index after the last row.
        prefix: number of positions of the sequence before the span, which is also the position of the first row.
        settled: number of rows at the start of the span that hold accepted tokens. The other rows hold draft tokens,
            which do not change the recurrent state.
        slot: state slot of the sequence: the index of its recurrent state, in models with recurrent layers.
    """

    start: int
    stop: int
    prefix: int
    settled: int
    slot: int


@dataclass(frozen=True)
class SpanTable(Generic[Array]):
    """The B spans of a batch as int32 arrays. A span is the rows (tokens) of one sequence.

    If the batch is padded to a bucket (the batch size of a captured graph), the padding spans have no rows.

    Attributes:
        starts: [B + 1], index of the first row of each span, then the index after the last row of the last span.
        prefixes: [B], number of positions of the sequence before the first row of each span.
        settled: [B], number of rows of each span that hold accepted tokens (see `Span.settled`).
        state_slots: [B], state slot of each span (see `Span.slot`).
        pages: [B, W], numbers of the KV pages of each span's sequence, in the order of positions. W is the maximum
            number of pages. Entries after the last page of a sequence are undefined.
    """

    starts: Array
    prefixes: Array
    settled: Array
    state_slots: Array
    pages: Array


@dataclass(frozen=True)
class Batch:
    """Input of one forward pass over T rows (tokens).

    A span is the rows of one sequence. The tensors `tokens`, `positions`, `slots` and `sample_rows` are int32 on the
    device.

    Attributes:
        tokens: [T], token ids. A negative number is a placeholder (see `take_tokens`).
        positions: [T], or [3, T] for rotary embeddings with three axes (M-RoPE).
        slots: [T], KV slot of each row: page * PAGE_SIZE + offset in the page; -1 for padding rows.
        sample_rows: [S + P], indexes of the S rows whose logits are needed, then of the P rows whose hidden states are
            needed.
        host_spans: the spans in host memory, without padding.
        device_spans: the spans in device memory, with padding; None if kernels read host memory.
        singles: number of spans of one row, which come first. 0 if the batch is padded to a bucket with draft rows.
        most_rows: upper bound of the number of rows of each of the other spans; 0 without other spans.
        samples: S, the number of rows whose logits are needed, without padding.
        pooled: P, the number of rows whose hidden states are needed.
        capacity: size of the largest batch, for which the buffers of the tensors are allocated.
        bucket: size of the captured graph to which the batch is padded; None if the pass runs without a captured graph.
        embeddings: [E, H], embeddings (of images, for example) that replace the token embeddings of E rows.
        embedding_rows: [E], indexes of the E rows.
        deepstack: [D, E, H], numbers to add to the hidden states of the E rows after each of the first D layers.
        attention_ends: [T] in host memory, number of tokens of its sequence that each row attends to; None for causal
            attention.
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
    deepstack: Tensor | None = None
    attention_ends: NDArray[np.int32] | None = None

    def take_tokens(self, last: Tensor) -> None:
        """Replace placeholders in `tokens` with the tokens that the previous step sampled.

        The engine prepares a step before it has the tokens of the previous step. A placeholder -i means the i-th
        token from the end of `last`.

        Args:
            last: [N], tokens that the previous step sampled.
        """
        from_last = last[self.tokens.clamp(max=-1)].clamp_(min=0)  # sampling returns -1 for non-finite logits
        torch.where(self.tokens < 0, from_last.to(self.tokens.dtype), self.tokens, out=self.tokens)

    @cached_property
    def spans(self) -> SpanTable[Tensor]:
        """The spans (the rows of each sequence) as tensors that kernels read.

        If the batch has no copy on a device (`device_spans`), the tensors are views of the arrays in host memory.
        """
        host = self.host_spans
        tables = (host.starts, host.prefixes, host.settled, host.state_slots, host.pages)
        return self.device_spans or SpanTable(*map(torch.from_numpy, tables))

    @cached_property
    def span_list(self) -> list[Span]:
        """Return the spans of the batch as a list, without padding."""
        table = self.host_spans
        columns = (column.tolist() for column in (table.prefixes, table.settled, table.state_slots))
        return [Span(*rows, *fields) for rows, *fields in zip(pairwise(table.starts.tolist()), *columns, strict=True)]
