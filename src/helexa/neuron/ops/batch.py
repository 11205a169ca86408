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
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor

Array = TypeVar("Array")


@dataclass(frozen=True)
class AttentionKind:
    """Parameters of one layer's attention."""

    scale: float  # factor applied to the products of queries and keys
    # number of positions that each query attends to, including its own position; None for all positions
    window: int | None = None
    # float32 [heads], attention sinks (Xiao et al., 2023): one extra score per head, which is added to the softmax but
    # has no value vector. None if the layer has no sinks.
    sinks: Tensor | None = None
    cap: float | None = None  # soft cap of the scores, `cap * tanh(score / cap)`
    causal: bool = False  # whether attention is causal even if `Batch.attention_ends` is set


class AttentionShape(NamedTuple):
    """Numbers of heads of an attention layer on all ranks, and size of a head."""

    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Capacity:
    """Size of the largest batch that an engine computes."""

    rows: int  # maximum number of rows (tokens)
    sequences: int  # maximum number of sequences
    pages_per_sequence: int  # maximum number of KV pages of a sequence


class Bucket(NamedTuple):
    """Batch size of a captured graph, to which smaller batches are padded.

    If `rows` equals `spans`, each span has one row. Otherwise, a span can also have rows with draft tokens.
    """

    rows: int  # number of rows (tokens), with padding
    spans: int  # number of spans (sequences), with padding


class Span(NamedTuple):
    """The rows (tokens) of one sequence in a batch."""

    start: int  # index of the first row in the batch
    stop: int  # index after the last row
    prefix: int  # number of positions of the sequence before the span, which is also the position of the first row
    # Number of rows at the start of the span that hold accepted tokens. The other rows hold draft tokens, which do not
    # change the recurrent state.
    settled: int
    slot: int  # state slot of the sequence: the index of its recurrent state, in models with recurrent layers


@dataclass(frozen=True)
class SpanTable(Generic[Array]):
    """The B spans of a batch as int32 arrays; padding spans have no rows."""

    starts: Array  # [B + 1], index of the first row of each span, then the index after the last row of the last span
    prefixes: Array  # [B], number of positions of the sequence before the first row of each span
    settled: Array  # [B], number of rows of each span that hold accepted tokens (see `Span.settled`)
    state_slots: Array  # [B], state slot of each span (see `Span.slot`)
    # [B, W], numbers of the KV pages of each span's sequence, in the order of positions. W is the maximum number of
    # pages. Entries after the last page of a sequence are undefined.
    pages: Array


@dataclass(frozen=True)
class Batch:
    """Input of one forward pass over T rows; the first four tensors are on the device."""

    tokens: Tensor  # [T], token ids. A negative number is a placeholder (see `take_tokens`).
    positions: Tensor  # [T], or [3, T] for rotary embeddings with three axes (M-RoPE)
    slots: Tensor  # [T], KV slot of each row: page * PAGE_SIZE + offset in the page; -1 for padding rows
    # [S + P], indexes of the S rows whose logits are needed, then indexes of the P rows whose hidden states are needed
    sample_rows: Tensor
    host_spans: SpanTable[NDArray[np.int32]]  # the spans in host memory, without padding
    device_spans: SpanTable[Tensor] | None  # the spans in device memory, with padding; None if kernels read host memory
    # Number of spans that have one row. These spans come before all others. 0 if the batch is padded to a bucket with
    # draft rows, because each of the bucket's spans can then have several rows.
    singles: int
    most_rows: int  # upper bound of the number of rows of a span with several rows; 0 if no span has several rows
    samples: int  # S, the number of rows whose logits are needed, without padding
    pooled: int  # P, the number of rows whose hidden states are needed
    capacity: Capacity  # size of the largest batch; buffers that all batches share are allocated for this size
    # size of the captured graph to which the batch is padded; None if the pass runs without a captured graph
    bucket: Bucket | None = None
    # [E, H], embeddings (of images, for example) that replace the token embeddings of E rows
    embeddings: Tensor | None = None
    embedding_rows: Tensor | None = None  # [E], indexes in the batch of the E rows that `embeddings` replaces
    # [D, E, H], numbers to add to the hidden states of the rows `embedding_rows` after each of the first D layers
    deepstack: Tensor | None = None
    # [T] in host memory, number of positions that each row attends to, from the start of the row's sequence; None for
    # causal attention
    attention_ends: NDArray[np.int32] | None = None
    # The next two fields are only set if layers with a sliding window have their own KV pages (see
    # `engine/window_page_pool.py`).
    window_slots: Tensor | None = None  # [T], KV slot of each row in the caches of layers with a sliding window
    # [B, W] in host memory, page numbers as in `SpanTable.pages`, for the caches of layers with a sliding window
    window_pages: NDArray[np.int32] | None = None

    @property
    def has_unneeded_rows(self) -> bool:
        """Whether the last layers may skip rows: those whose outputs nothing reads."""
        # Kernels compute the rows `sample_rows` alone only with causal attention.
        return self.sample_rows.shape[0] < self.tokens.shape[0] and self.attention_ends is None

    def slots_of(self, kind: AttentionKind) -> Tensor:
        """Return each row's KV slot in the caches of layers with attention of `kind`."""
        return self.slots if kind.window is None or self.window_slots is None else self.window_slots

    def pages_of(self, windowed: bool) -> NDArray[np.int32]:
        """Return the spans' KV page numbers [B, W], in host memory.

        If `windowed`, the table is for layers with a sliding window.
        """
        return self.window_pages if windowed and self.window_pages is not None else self.host_spans.pages

    def take_tokens(self, last: Tensor) -> None:
        """Replace placeholders in `tokens` with tokens that the previous step has sampled.

        A placeholder -i means the i-th token from the end of `last`, the sampled tokens of the previous step. If this
        token is `NON_FINITE`, the placeholder becomes 0.
        """
        # The engine prepares a step before it has the tokens of the previous step.
        # Sampling returns -1 for non-finite logits, which is not a token id, so -1 is replaced with 0.
        from_last = last[self.tokens.clamp(max=-1)].clamp_(min=0)
        tensors.where(self.tokens < 0, from_last.to(self.tokens.dtype), self.tokens, out=self.tokens)

    @cached_property
    def spans(self) -> SpanTable[Tensor]:
        """Spans for kernels: on the device, with padding, or host memory without padding."""
        host = self.host_spans
        tables = (host.starts, host.prefixes, host.settled, host.state_slots, host.pages)
        return self.device_spans or SpanTable(*map(tensors.from_numpy, tables))

    @cached_property
    def span_list(self) -> list[Span]:
        """Return the spans of the batch as a list, without padding."""
        table = self.host_spans
        columns = (column.tolist() for column in (table.prefixes, table.settled, table.state_slots))
        return [Span(*rows, *fields) for rows, *fields in zip(pairwise(table.starts.tolist()), *columns, strict=True)]
