"""Work list of the native attention kernels for one batch.

The work list divides the queries of the batch into tiles. It also divides the positions of a long decode row into
segments of SEGMENT_POSITIONS (512) positions, which several threads compute as partial results.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Capacity, Span
from helexa.neuron.ops.constants import PAGE_SIZE, SEGMENT_POSITIONS, SPLIT_ROWS

_TILE = 24  # maximum number of queries per tile; a query is one head of one row


class Tile(NamedTuple):
    """One unit of work of the attention kernel: queries of consecutive rows of one sequence.

    A segment is SEGMENT_POSITIONS (512) consecutive positions of a sequence. The fields match the struct `tile` of
    kernels.h.

    Attributes:
        row: index of the first row in the batch.
        rows: number of rows.
        position: position of the first row in its sequence.
        pages: index in `AttentionPlan.pages` of the sequence's first page number.
        first_segment: first segment of positions that the tile attends to.
        segments: number of segments that the tile attends to.
        partial: index of the partial result that the tile writes; -1 if the tile computes the final output.
        seen: number of positions that every row sees; 0 for causal attention.
    """

    row: int
    rows: int
    position: int
    pages: int
    first_segment: int
    segments: int
    partial: int
    seen: int = 0


class Split(NamedTuple):
    """A decode row whose segments of positions are computed as partial results, which a second kernel merges.

    The fields match the struct `split` of kernels.h.

    Attributes:
        row: index of the row in the batch.
        partial: index of the first partial result.
        segments: number of partial results.
    """

    row: int
    partial: int
    segments: int


class AttentionPlan:
    """The work list of the attention kernels for the current batch.

    All tensors have fixed addresses, because captured graphs contain these addresses.

    Args:
        capacity: size of the largest batch.
        group: number of query heads per KV head, in the layers that use this work list.

    Attributes:
        tile_count: int64 [1], number of tiles of the current batch.
        tiles: int64 [.., 8], one `Tile` per line; only the first `tile_count` lines are used.
        split_count: int64 [1], number of split rows of the current batch.
        splits: int64 [.., 3], one `Split` per line; only the first `split_count` lines are used.
        pages: int64, KV page numbers of all sequences, one sequence after another.
    """

    def __init__(self, capacity: Capacity, group: int) -> None:
        self._rows_per_tile = max(_TILE // group, 1)
        self._spans = -(-capacity.pages_per_sequence * PAGE_SIZE // SEGMENT_POSITIONS) * SPLIT_ROWS
        self.tile_count = torch.zeros(1, dtype=torch.int64)
        self.tiles = torch.zeros(capacity.rows + self._spans, len(Tile._fields), dtype=torch.int64)
        self.split_count = torch.zeros(1, dtype=torch.int64)
        self.splits = torch.zeros(SPLIT_ROWS, len(Split._fields), dtype=torch.int64)
        self.pages = torch.zeros(capacity.sequences * capacity.pages_per_sequence, dtype=torch.int64)
        self._partials: dict[tuple[int, int], Tensor] = {}

    def partials(self, heads: int, dim: int) -> Tensor:
        """Return the memory for partial results of attention, float32 [segments, heads, 2 + dim].

        A partial result consists of the largest score, the sum of weights, and the sum of weighted values. All layers
        with the same `heads` and `dim` share the memory. The memory keeps its address, because captured graphs contain
        the address.
        """
        if (heads, dim) not in self._partials:
            partials = np.zeros(
                (self._spans, heads, 2 + dim), dtype=np.float32
            )  # memory pages become resident on the first write
            self._partials[heads, dim] = torch.from_numpy(partials)
        return self._partials[heads, dim]

    def lay(self, batch: Batch) -> None:
        """Replace the contents of all tensors with the work list of `batch`."""
        tiles: list[Tile] = []
        splits: list[Split] = []
        pages: list[int] = []
        rows_per_tile = self._rows_per_tile
        few = len(batch.span_list) <= SPLIT_ROWS
        partial = 0
        for span, page_row in zip(batch.span_list, batch.host_spans.pages, strict=True):
            first_page = len(pages)
            pages += page_row[: -(-(span.prefix + span.stop - span.start) // PAGE_SIZE)].tolist()
            count = span.stop - span.start
            if batch.attention_ends is not None and count > 1:
                tiles += self._with_ends(span, batch.attention_ends[span.start : span.stop], first_page)
                continue
            for start in range(0, count, rows_per_tile):
                rows, position = min(rows_per_tile, count - start), span.prefix + start
                segments = -(-(position + rows) // SEGMENT_POSITIONS)
                row = span.start + start
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
        """Yield the tiles of a span with the given `Batch.attention_ends`.

        The rows of a tile either have causal attention, or attend to the same number of positions.
        """
        start, count = 0, len(ends)
        while start < count:
            position, seen = span.prefix + start, int(ends[start])
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


def _fill(table: Tensor, values: list[Tile] | list[Split] | list[int]) -> None:
    if values:
        table.numpy()[: len(values)] = values
