"""Attention over the paged KV cache in plain torch.

A span is the rows of one sequence in a batch. Spans of one row (decode) are computed in groups, longer spans (prefill)
one by one.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.constants import PAGE_SIZE


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows of B sequences with similar lengths, which are computed together.

    Attributes:
        rows: slice of these rows in the batch.
        pages: [B, P], page numbers of each sequence. A sequence with fewer than P pages repeats its first page, which
            `mask` hides.
        lengths: [B], number of positions of each sequence, including the row's own position.
        longest: the largest number in `lengths`.
        contiguous: number of the first page if B is 1 and the page numbers ascend without a gap, so that attention can
            read the cache without a copy; else None.
    """

    rows: slice
    pages: Tensor
    lengths: Tensor
    longest: int
    contiguous: int | None

    @cached_property
    def mask(self) -> Tensor:
        """Additive mask [B, longest]: 0 for the positions of each sequence, -inf after the sequence's last position."""
        beyond = torch.arange(self.longest, device=self.lengths.device) >= self.lengths[:, None]
        return torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, float("-inf"))


@dataclass(frozen=True)
class Chunk:
    """Several rows of one sequence (a prefill chunk), which attend to earlier positions and to each other.

    Attributes:
        rows: slice of these rows in the batch.
        prefix: number of positions of the sequence before these rows.
        pages: [P], page numbers of the sequence up to the last of these rows.
        contiguous: number of the first page if the page numbers ascend without a gap; else None.
    """

    rows: slice
    prefix: int
    pages: Tensor
    contiguous: int | None


class SpanGroups:
    """The sequences of a batch, grouped for attention. All layers use the same groups.

    Attributes:
        batch: the batch.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        device = batch.tokens.device
        pages = [
            span_pages[: -(-(span.prefix + span.stop - span.start) // PAGE_SIZE)].tolist()
            for span, span_pages in zip(batch.span_list, batch.host_spans.pages, strict=True)
        ]
        spans = list(zip(batch.span_list, pages, strict=True))
        self._chunks = [
            Chunk(
                slice(span.start, span.stop),
                span.prefix,
                torch.tensor(span_pages, device=device),
                _first_if_contiguous(span_pages),
            )
            for span, span_pages in spans
            if span.stop - span.start > 1
        ]
        groups: list[list[tuple[int, int, list[int]]]] = []  # row, positions and pages
        for span, span_pages in spans:
            if span.stop - span.start > 1:
                continue
            if not groups or len(span_pages) > 2 * len(groups[-1][0][2]):  # padding at most doubles the pages read
                groups.append([])
            groups[-1].append((span.start, span.prefix + 1, span_pages))
        self._decodes = [_decode_group(group, device) for group in groups]

    def attend(self, queries: Tensor, cache: Tensor, kind: AttentionKind) -> Tensor:
        """Return the causal attention output [T, heads, D] of `queries` over the KV pages of their sequences."""
        out = torch.empty_like(queries)
        for group in self._decodes:
            out[group.rows] = _decode(queries[group.rows], cache, group, kind)
        for chunk in self._chunks:
            out[chunk.rows] = attend_chunk(queries[chunk.rows], cache, chunk, kind)
        return out


def _decode_group(group: list[tuple[int, int, list[int]]], device: torch.device) -> DecodeGroup:
    rows, lengths, pages = zip(*group, strict=True)
    width = max(map(len, pages))
    padded = [span_pages + span_pages[:1] * (width - len(span_pages)) for span_pages in pages]
    return DecodeGroup(
        rows=slice(rows[0], rows[-1] + 1),
        pages=torch.tensor(padded, device=device),
        lengths=torch.tensor(lengths, device=device),
        longest=max(lengths),
        contiguous=_first_if_contiguous(pages[0]) if len(group) == 1 else None,
    )


def _first_if_contiguous(pages: list[int]) -> int | None:
    return pages[0] if pages[-1] - pages[0] == len(pages) - 1 and pages == sorted(pages) else None


def _decode(queries: Tensor, cache: Tensor, group: DecodeGroup, kind: AttentionKind) -> Tensor:
    rows, heads, dim = queries.shape
    kv_heads = cache.shape[1]
    keys, values = _pages(cache, group.pages, group.contiguous)  # [kv_heads * B, L, D]
    keys, values = keys[:, : group.longest], values[:, : group.longest]
    window = kind.window if kind.window is not None and kind.window < group.longest else None
    if rows == 1 and window is None and kind.sinks is None:
        queries = queries.reshape(1, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(queries, keys[None], values[None], scale=kind.scale)
        return out.view(1, heads, dim)
    # Fold the query heads of one KV head into the rows of one product.
    grouped = queries.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads * rows, -1, dim)
    scores = torch.bmm(grouped * kind.scale, keys.transpose(1, 2)).float()
    scores = scores.view(kv_heads, rows, -1, group.longest).add_(group.mask[:, None])
    if window is not None:
        places = torch.arange(group.longest, device=scores.device)
        scores.masked_fill_((places < group.lengths[:, None] - window)[:, None], float("-inf"))
    sinks = None if kind.sinks is None else kind.sinks.view(kv_heads, 1, -1, 1)
    weights = _softmax(scores, sinks).view(kv_heads * rows, -1, group.longest)
    out = torch.bmm(weights.to(values.dtype), values)
    return out.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads, dim)


def attend_chunk(queries: Tensor, cache: Tensor, chunk: Chunk, kind: AttentionKind) -> Tensor:
    """Return the causal attention output [N, heads, D] of the N rows of a chunk.

    Args:
        queries: [N, heads, D].
        cache: KV cache of the layer, which already contains these rows.
    """
    count, heads, _ = queries.shape
    kv_heads, length = cache.shape[1], chunk.prefix + count
    keys, values = _pages(cache, chunk.pages, chunk.contiguous)
    keys = keys[:, :length].repeat_interleave(heads // kv_heads, dim=0)
    values = values[:, :length].repeat_interleave(heads // kv_heads, dim=0)
    queries = queries.transpose(0, 1)
    mask = None
    windowed = kind.window is not None and length > kind.window
    if chunk.prefix or windowed or kind.sinks is not None:
        rows = torch.arange(chunk.prefix, length, device=queries.device)[:, None]
        places = torch.arange(length, device=queries.device)
        mask = places <= rows
        if kind.window is not None:
            mask &= places > rows - kind.window
    if kind.sinks is not None:
        assert mask is not None
        scores = torch.bmm(queries * kind.scale, keys.transpose(1, 2)).float()
        weights = _softmax(scores.masked_fill_(~mask, float("-inf")), kind.sinks.view(-1, 1, 1))
        return torch.bmm(weights.to(values.dtype), values).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=kind.scale
    )
    return out[0].transpose(0, 1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of `scores` over the last dimension. If `sinks` are given, they count as extra scores."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    extended = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(extended, dim=-1)[..., :-1]


def _pages(cache: Tensor, pages: Tensor, contiguous: int | None) -> tuple[Tensor, Tensor]:
    """Return the keys and the values in `pages` of a cache, each [kv_heads * B, P * page_size, D].

    Args:
        pages: [P] for one sequence (B is 1), or [B, P].
        contiguous: number of the first page if the pages are contiguous. The results are then views of the cache
            instead of copies.
    """
    _, heads, _, dim = cache.shape
    width = pages.shape[-1] * PAGE_SIZE
    if contiguous is not None:
        span = cache[:, :, contiguous * PAGE_SIZE : contiguous * PAGE_SIZE + width]
        return span[0], span[1]
    paged = cache.view(2, heads, -1, PAGE_SIZE * dim).index_select(2, pages.flatten())
    return paged[0].view(-1, width, dim), paged[1].view(-1, width, dim)
