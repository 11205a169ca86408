"""Attention on native kernels, and the work lists that divide it among threads."""

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.ops.batch import AttentionKind, Batch, Capacity, Span
from helexa.neuron.ops.kernel_header import MAX_QUERIES, PAGE_SIZE, SEGMENT_POSITIONS, SPLIT_ROWS
from helexa.neuron.ops.native.launcher import NO_WINDOW, Launcher
from helexa.neuron.processes.heaps_and_shared_memory import prefer_page_size
from helexa.neuron.tensors import Tensor

_LATENT_QUERIES = 16  # maximum query heads of a part (see `_parts_of_group`) if the cache has no values

_PLANS = 4  # number of cached work lists; a vision tower uses one or two for an image


class Tile(NamedTuple):
    """A unit of work of the attention kernel: consecutive rows of one sequence.

    A segment is SEGMENT_POSITIONS (512) consecutive positions of a sequence. The fields match the struct `tile` of
    kernels.h.
    """

    row: int  # index of the first row in the batch
    rows: int  # number of rows
    position: int  # position of the first row in its sequence
    pages: int  # index in `AttentionPlan.pages` of the sequence's first page number
    first_segment: int  # index of the first segment that the tile attends to
    segments: int  # number of segments that the tile attends to
    partial: int  # index of the partial result that the tile writes; -1 if the tile computes the final output
    seen: int = 0  # number of positions that every row of the tile attends to; 0 for causal attention


class Split(NamedTuple):
    """A decode row whose segments are computed separately, then merged.

    The fields match the struct `split` of kernels.h.
    """

    row: int  # index of the row in the batch
    partial: int  # index of the row's first partial result
    segments: int  # number of the row's partial results


class AttentionPlan:
    """The work list of the native attention kernels for the current batch.

    All tensors have fixed addresses, because captured graphs contain these addresses.

    Args:
        group: number of query heads per KV head, in the layers that use this work list.
        partials: memory for partial results, which all work lists share, because layers run one after another.
        sampled: whether the layers compute only the rows `Batch.sample_rows`.
        windowed: whether the layers have a sliding window with its own pages (see `Batch.window_pages`).
        causal: whether the layers ignore `Batch.attention_ends`.
    """

    def __init__(
        self,
        capacity: Capacity,
        partials: dict[tuple[int, int], Tensor],
        group: int,
        sampled: bool = False,
        windowed: bool = False,
        causal: bool = False,
    ) -> None:
        self._sampled, self._windowed, self._causal = sampled, windowed, causal
        self._rows_per_tile = MAX_QUERIES // group  # a query is one head of one row
        self._spans = -(-capacity.pages_per_sequence * PAGE_SIZE // SEGMENT_POSITIONS) * SPLIT_ROWS
        self.tile_count = tensors.zeros(1, dtype=tensors.int64)  # int64 [1], number of tiles of the current batch
        # int64 [.., 8], one `Tile` per line; only the first `tile_count` lines are used
        self.tiles = tensors.zeros(capacity.rows + self._spans, len(Tile._fields), dtype=tensors.int64)
        self.split_count = tensors.zeros(1, dtype=tensors.int64)  # int64 [1], number of split rows of the current batch
        # int64 [.., 3], one `Split` per line; only the first `split_count` lines are used
        self.splits = tensors.zeros(SPLIT_ROWS, len(Split._fields), dtype=tensors.int64)
        # int64, KV page numbers of all sequences, one sequence after another
        self.pages = tensors.zeros(capacity.sequences * capacity.pages_per_sequence, dtype=tensors.int64)
        self._partials = partials

    def partials(self, heads: int, dim: int) -> Tensor:
        """Return the memory for partial results, float32 [segments, heads, 2 + dim].

        A partial result consists of the largest score, the sum of weights, and the sum of weighted values. All layers
        with the same `heads` and `dim` share the memory.
        """
        # Captured graphs contain the address of this memory, so the memory is allocated once.
        if (heads, dim) not in self._partials:
            # The operating system allocates a page of `np.zeros` only when a kernel first writes to the page, so unused
            # memory costs nothing.
            partials = np.zeros((self._spans, heads, 2 + dim), dtype=np.float32)
            self._partials[heads, dim] = tensors.from_numpy(partials)
        return self._partials[heads, dim]

    def lay(self, batch: Batch) -> None:
        """Replace the contents of all tensors with the work list of `batch`."""
        tiles: list[Tile] = []
        splits: list[Split] = []
        pages: list[int] = []
        rows_per_tile = self._rows_per_tile
        first_pages: list[int] = []
        for span, page_row in zip(batch.span_list, batch.pages_of(self._windowed), strict=True):
            first_pages.append(len(pages))
            pages += page_row[: -(-(span.prefix + span.stop - span.start) // PAGE_SIZE)].tolist()
        spans = [*zip(batch.span_list, first_pages, strict=True)]
        if self._sampled:
            spans = _sampled_rows(batch, spans)
        few = len(spans) <= SPLIT_ROWS
        partial = 0
        for span, first_page in spans:
            count = span.stop - span.start
            if batch.attention_ends is not None and count > 1 and not self._causal:
                tiles += self._with_ends(span, batch.attention_ends[span.start : span.stop], first_page)
                continue
            for start in range(0, count, rows_per_tile):
                rows, position = min(rows_per_tile, count - start), span.prefix + start
                segments = -(-(position + rows) // SEGMENT_POSITIONS)
                row = span.start + start
                # With many sequences, the threads have enough work without a division of long sequences.
                if few and count == 1 and segments > 1:
                    splits.append(Split(row, partial, segments))
                    tiles += [Tile(row, 1, position, first_page, s, 1, partial + s) for s in range(segments)]
                    partial += segments
                else:
                    tiles.append(Tile(row, rows, position, first_page, 0, segments, -1))
        _fill(self.tile_count, [len(tiles)])
        _fill(self.tiles, tiles)
        _fill(self.split_count, [len(splits)])
        _fill(self.splits, splits)
        _fill(self.pages, pages)

    def _with_ends(self, span: Span, ends: NDArray[np.int32], first_page: int) -> Iterator[Tile]:
        """Yield the tiles of a span; `ends` are its rows' `Batch.attention_ends`."""
        start, count = 0, len(ends)
        while start < count:
            position, seen = span.prefix + start, int(ends[start])
            # The rows of a tile either have causal attention, or attend to the same number of positions.
            causal = seen == position + 1
            stop = start + 1
            while stop < min(start + self._rows_per_tile, count):
                own = span.prefix + stop + 1
                if (ends[stop] != own) if causal else (ends[stop] != seen):
                    break
                stop += 1
            positions = position + stop - start if causal else seen
            segments = -(-positions // SEGMENT_POSITIONS)
            yield Tile(span.start + start, stop - start, position, first_page, 0, segments, -1, 0 if causal else seen)
            start = stop


class PagedAttention:
    """Attention over the pages of KV caches, which are uint8 [pages, kv_heads, bytes].

    Args:
        kv_bits: bits of each number in the KV caches, 16 or 8. Caches without values always have 16.
    """

    def __init__(self, launcher: Launcher, kv_bits: int) -> None:
        self._launcher = launcher
        self._kv_bits = kv_bits
        self._batch: Batch | None = None
        # work lists by the arguments `group`, `sampled`, `windowed` and `causal`
        self._plans: dict[tuple[int, bool, bool, bool], AttentionPlan] = {}
        self._partials: dict[tuple[int, int], Tensor] = {}

    def lay(self, batch: Batch) -> None:
        """Compute the work lists of a batch; required before each of its forward passes."""
        self._batch = batch
        for (_, sampled, _, _), plan in self._plans.items():
            if not sampled or batch.has_unneeded_rows:
                plan.lay(batch)

    def page_bytes(self, kv_heads: int, head_dim: int, values: bool = True) -> int:
        """Return the bytes of one KV page in one layer (see `Ops.page_bytes`)."""
        # A cache without values always has 16 bits per number. In an 8-bit cache, keys and values are rounded
        # differently, so values would have to be stored in addition to keys, and the cache would be larger.
        if self._kv_bits == 16 or not values:
            return kv_heads * (1 + values) * 2 * head_dim * PAGE_SIZE
        numbers, scales, base = 2 * head_dim * PAGE_SIZE, 3 * 4 * PAGE_SIZE, 2 * head_dim
        return kv_heads * (numbers + scales + base)

    def new_cache(self, kv_heads: int, pages: int, head_dim: int, values: bool = True) -> Tensor:
        """Return a zeroed KV cache with `pages` pages for one layer (see `Ops.new_cache`)."""
        size = self.page_bytes(kv_heads, head_dim, values)
        # The operating system allocates physical memory only when a page is first written. A huge page would make 2 MiB
        # resident at once.
        memory = mmap.mmap(-1, pages * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_page_size(memory, huge=False)
        return tensors.frombuffer(memory, dtype=tensors.uint8).view(pages, kv_heads, size // kv_heads)

    def format_of(self, cache: Tensor, dim: int) -> dict[str, bool]:
        """Return the kernel arguments for the format of `cache` with head width `dim`."""
        keys_only = cache.shape[2] == self.page_bytes(1, dim, values=False)
        return {"narrow": self._kv_bits == 8 and not keys_only, "keys_only": keys_only}

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind, sampled: bool) -> Tensor:
        """Return the result of `Ops.attend`, or of `Ops.attend_sampled` if `sampled`.

        `batch` must be the batch of the last call of `lay`.
        """
        assert batch is self._batch, "attention for another batch than that of the running `NativeOps.run`"
        (rows, heads, dim), cached_heads = queries.shape, cache.shape[1]
        formats = self.format_of(cache, dim)
        kv_heads = cached_heads * _parts_of_group(heads // cached_heads, formats["keys_only"])
        windowed = kind.window is not None and batch.window_pages is not None
        key = heads // kv_heads, sampled, windowed, kind.causal and batch.attention_ends is not None
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = AttentionPlan(batch.capacity, self._partials, *key)
            plan.lay(batch)
        out = self._launcher.take(rows, heads, dim)
        both = {"partials": plan.partials(heads, dim), "out": out, "sinks": kind.sinks, "heads": heads, "dim": dim}
        self._launcher.launch(
            "attend",
            queries=queries,
            cache=cache,
            tile_count=plan.tile_count,
            tiles=plan.tiles,
            page_numbers=plan.pages,
            kv_heads=kv_heads,
            cached_heads=cached_heads,
            **formats,
            window=kind.window or NO_WINDOW,
            scale=kind.scale,
            cap=kind.cap or 0.0,
            **both,
        )
        self._launcher.launch("combine", split_count=plan.split_count, splits=plan.splits, **both)
        return out


def _sampled_rows(batch: Batch, spans: Sequence[tuple[Span, int]]) -> list[tuple[Span, int]]:
    """Return a span of one row for each sampled row, and the index of its first page."""
    rows = batch.sample_rows.tolist()
    numbers = np.searchsorted(batch.host_spans.starts, rows, "right") - 1
    sampled: list[tuple[Span, int]] = []
    for index, (row, number) in enumerate(zip(rows, numbers.tolist(), strict=True)):
        span, first_page = spans[number]
        sampled.append((span._replace(start=index, stop=index + 1, prefix=span.prefix + row - span.start), first_page))
    return sampled


def _fill(table: Tensor, values: list[Tile] | list[Split] | list[int]) -> None:
    if values:
        table.numpy()[: len(values)] = values


def _parts_of_group(group: int, keys_only: bool) -> int:
    """Return the number of parts into which the query heads of a KV head are divided.

    Each part is an item of work. `group` is the number of query heads per KV head.
    """
    # A tile has at most `MAX_QUERIES` heads. In latent attention, all query heads share one KV head without values.
    # With smaller parts, several threads can compute a short sequence.
    limit = _LATENT_QUERIES if keys_only else MAX_QUERIES
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= limit)


class FramePlan:
    """Work list of the attention kernel for frames (see `Ops.attend_frames`).

    The kernel reads keys and values from pages as in a KV cache. Each frame begins with a new page.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        tiles: list[Tile] = []
        slots: list[Tensor] = []
        page = row = 0
        for length in lengths:
            segments = -(-length // SEGMENT_POSITIONS)
            for start in range(0, length, MAX_QUERIES):
                rows = min(MAX_QUERIES, length - start)
                tiles.append(Tile(row + start, rows, start, page, 0, segments, -1, length))
            slots.append(tensors.arange(page * PAGE_SIZE, page * PAGE_SIZE + length, dtype=tensors.int32))
            row += length
            page += -(-length // PAGE_SIZE)
        self.tile_count = tensors.tensor([len(tiles)])  # int64 [1], number of tiles
        self.tiles = tensors.tensor(tiles, dtype=tensors.int64)  # int64 [tile_count, 8], one `Tile` per line
        self.pages = tensors.arange(page)  # int64, the numbers of all pages
        self.slots = tensors.cat(slots)  # int32 [T], place of each row: page * PAGE_SIZE + offset in the page


def attend_frames(
    launcher: Launcher, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: tuple[int, ...], scale: float
) -> Tensor:
    """Return each row's attention to all rows of its frame, with native kernels."""
    rows, heads, dim = qkv.shape[0], qkv.shape[1] // 3, qkv.shape[2]
    plan = _plan(lengths)
    cosines, sines = rope or (tensors.empty(rows, 0), tensors.empty(rows, 0))
    queries = launcher.take(rows, heads, dim, dtype=tensors.bfloat16)
    # temporary memory in the layout of a 16-bit KV cache
    cache = launcher.take(plan.pages.shape[0] * heads * 4 * PAGE_SIZE * dim, dtype=tensors.uint8)
    shape = {"heads": heads, "kv_heads": heads, "dim": dim, "narrow": False, "keys_only": False}
    launcher.launch(
        "rotate_store",
        qkv=qkv,
        cosines=cosines,
        sines=sines,
        queries=queries,
        cache=cache,
        slots=plan.slots,
        query_norm=None,
        key_norm=None,
        rows=rows,
        width=3 * heads,
        half=cosines.shape[1],
        norm_last=False,
        eps=0.0,
        norm_values=False,
        **shape,
    )
    out = launcher.take(rows, heads, dim)
    launcher.launch(
        "attend",
        cached_heads=heads,
        queries=queries,
        cache=cache,
        tile_count=plan.tile_count,
        tiles=plan.tiles,
        page_numbers=plan.pages,
        partials=out,  # not used, because no tile computes partial results
        out=out,
        sinks=None,
        window=NO_WINDOW,
        scale=scale,
        cap=0.0,
        **shape,
    )
    return out


@tensors.cached(_PLANS)
def _plan(lengths: tuple[int, ...]) -> FramePlan:
    return FramePlan(lengths)
