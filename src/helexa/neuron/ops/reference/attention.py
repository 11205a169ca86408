"""Attention over the paged KV cache, and within frames of images, in plain torch.

A span is the rows of one sequence in a batch. Spans of one row (decode) are computed in groups, longer spans (prefill)
one by one.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind, Batch
from helexa.neuron.ops.kernel_header import PAGE_SIZE


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows of B sequences of similar lengths, which are computed together."""

    rows: slice  # slice of these rows in the batch
    # [B, P], page numbers of each sequence. A sequence with fewer than P pages repeats its first page, which `mask`
    # hides.
    pages: Tensor
    lengths: Tensor  # [B], number of positions of each sequence, including the position of its row
    longest: int  # the largest number in `lengths`
    # Page number of the sequence's first page if B is 1 and the page numbers ascend without a gap; else None. Attention
    # can read contiguous pages without a copy.
    contiguous: int | None

    @cached_property
    def mask(self) -> Tensor:
        """Mask [sequences, longest] for scores: -inf after a sequence's last position."""
        beyond = torch.arange(self.longest, device=self.lengths.device) >= self.lengths[:, None]
        return torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, float("-inf"))


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one sequence, such as a prefill chunk."""

    rows: slice  # slice of these rows in the batch
    prefix: int  # number of positions of the sequence before these rows
    pages: Tensor  # [P], page numbers of the sequence, up to the page of the last of these rows
    # Page number of the first page if the page numbers ascend without a gap; else None. Attention can read contiguous
    # pages without a copy.
    contiguous: int | None
    ends: Tensor | None = None  # [N], number of positions that each row attends to; None for causal attention


class SpanGroups:
    """The sequences of a batch, grouped for attention; all layers use the same groups."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch  # the batch that contains the sequences
        device = batch.tokens.device
        pages = [
            span_pages[: -(-(span.prefix + span.stop - span.start) // PAGE_SIZE)].tolist()
            for span, span_pages in zip(batch.span_list, batch.host_spans.pages, strict=True)
        ]
        spans = list(zip(batch.span_list, pages, strict=True))
        ends = None if batch.attention_ends is None else torch.from_numpy(batch.attention_ends).to(device)
        self._chunks = [
            Chunk(
                slice(span.start, span.stop),
                span.prefix,
                torch.tensor(span_pages, device=device),
                _first_if_contiguous(span_pages),
                None if ends is None else ends[span.start : span.stop],
            )
            for span, span_pages in spans
            if span.stop - span.start > 1
        ]
        groups: list[list[tuple[int, int, list[int]]]] = []  # row, positions and pages
        for span, span_pages in spans:
            if span.stop - span.start > 1:
                continue
            # A group pads the pages of its sequences to the same number. The padding at most doubles the pages read.
            if not groups or len(span_pages) > 2 * len(groups[-1][0][2]):
                groups.append([])
            groups[-1].append((span.start, span.prefix + 1, span_pages))
        self._decodes = [_decode_group(group, device) for group in groups]

    def attend(self, queries: Tensor, cache: Tensor, kind: AttentionKind) -> Tensor:
        """Return the attention [rows, heads, head_dim] of queries (see `Ops.attend`)."""
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
    if rows == 1 and window is None and kind.sinks is None and kind.cap is None:
        queries = queries.reshape(1, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(queries, keys[None], values[None], scale=kind.scale)
        return out.view(1, heads, dim)
    # The query heads that share a KV head become the rows of one matrix product.
    grouped = queries.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads * rows, -1, dim)
    scores = _scores(grouped, keys, kind)
    scores = scores.view(kv_heads, rows, -1, group.longest).add_(group.mask[:, None])
    if window is not None:
        places = torch.arange(group.longest, device=scores.device)
        scores.masked_fill_((places < group.lengths[:, None] - window)[:, None], float("-inf"))
    sinks = None if kind.sinks is None else kind.sinks.view(kv_heads, 1, -1, 1)
    weights = _softmax(scores, sinks).view(kv_heads * rows, -1, group.longest)
    out = torch.bmm(weights.to(values.dtype), values)
    return out.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads, dim)


def attend_chunk(queries: Tensor, cache: Tensor, chunk: Chunk, kind: AttentionKind) -> Tensor:
    """Return the attention output [rows, heads, head_dim] of a prefill chunk's rows."""
    count, heads, _ = queries.shape
    kv_heads, length = cache.shape[1], chunk.prefix + count
    keys, values = _pages(cache, chunk.pages, chunk.contiguous)
    keys = keys[:, :length].repeat_interleave(heads // kv_heads, dim=0)
    values = values[:, :length].repeat_interleave(heads // kv_heads, dim=0)
    queries = queries.transpose(0, 1)
    mask = None
    windowed = kind.window is not None and length > kind.window
    explicit = kind.sinks is not None or kind.cap is not None
    ends = None if kind.causal else chunk.ends
    if chunk.prefix or windowed or explicit or ends is not None:
        rows = torch.arange(chunk.prefix, length, device=queries.device)[:, None]
        places = torch.arange(length, device=queries.device)
        mask = places <= rows if ends is None else places < ends[:, None]
        if kind.window is not None:
            mask &= places > rows - kind.window
    if explicit:
        assert mask is not None
        scores = _scores(queries, keys, kind).masked_fill_(~mask, float("-inf"))
        weights = _softmax(scores, None if kind.sinks is None else kind.sinks.view(-1, 1, 1))
        return torch.bmm(weights.to(values.dtype), values).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=kind.scale
    )
    return out[0].transpose(0, 1)


def _scores(queries: Tensor, keys: Tensor, kind: AttentionKind) -> Tensor:
    """Return the scores of queries and keys, float32 [batch, queries, keys]."""
    scores = torch.bmm(queries * kind.scale, keys.transpose(1, 2)).float()
    return scores if kind.cap is None else (scores / kind.cap).tanh_() * kind.cap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [..., positions] over the last dimension.

    The shape of `sinks` can be broadcast to [..., 1].
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    # The sinks take part in the softmax as one more score, but are not part of the result.
    extended = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(extended, dim=-1)[..., :-1]


def _pages(cache: Tensor, pages: Tensor, contiguous: int | None) -> tuple[Tensor, Tensor]:
    """Return keys and values, each [kv_heads * sequences, positions, head_dim].

    Args:
        pages: page numbers, [sequences, pages], or [pages] for one sequence.
        contiguous: as in `DecodeGroup`.
    """
    _, heads, _, dim = cache.shape
    width = pages.shape[-1] * PAGE_SIZE
    if contiguous is not None:
        # Contiguous pages need no copy, so the result consists of views of the cache.
        span = cache[:, :, contiguous * PAGE_SIZE : contiguous * PAGE_SIZE + width]
        return span[0], span[-1]
    paged = cache.view(len(cache), heads, -1, PAGE_SIZE * dim).index_select(2, pages.flatten())
    return paged[0].view(-1, width, dim), paged[-1].view(-1, width, dim)


def attend_frames(qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Return each row's attention to all rows of its frame, in plain torch."""
    query, key, value = qkv.chunk(3, dim=1)
    if rope is not None:
        query, key = rotated_by(query, rope), rotated_by(key, rope)
    frames = zip(*(heads.transpose(0, 1).split(lengths, dim=1) for heads in (query, key, value)), strict=True)
    outputs = [F.scaled_dot_product_attention(*(heads[None] for heads in frame), scale=scale)[0] for frame in frames]
    return torch.cat(outputs, dim=1).transpose(0, 1).contiguous()


def rotated_by(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Return `heads` [rows, heads, head_dim], with RoPE applied to R numbers per head.

    RoPE rotates the first R numbers of a head, and the others stay the same. Number i forms a pair with number
    i + R / 2. The rotation uses float32, and the result has the dtype of `heads`.
    """
    cos, sin = (table[:, None] for table in rope)  # [T, 1, R / 2]
    half = cos.shape[-1]
    first, second, unrotated = heads.float().split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, unrotated)
    return torch.cat(rotated, dim=-1).to(heads.dtype)
