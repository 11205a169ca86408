"""Plan of a batch's attention for the native kernels: tiles of queries, and rows split among threads."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Capacity
from helexa.neuron.ops.constants import PAGE_SIZE, SEGMENT_POSITIONS, SPLIT_ROWS

_TILE = 24  # maximum number of queries that read a page together


class Tile(NamedTuple):
    """One unit of work of the attention kernel; the struct `tile` of kernels.h."""

    row: int
    rows: int
    position: int
    pages: int
    first_segment: int
    segments: int
    partial: int


class Split(NamedTuple):
    """A `split` of kernels.h."""

    row: int
    partial: int
    segments: int


class AttentionPlan:
    """Attention tables at fixed addresses, for layers with `group` query heads per KV head.

    Attributes:
        tile_count, split_count: int64 [1], number of used rows of `tiles` and `splits`.
        tiles, splits: int64 [.., fields], one `Tile` or `Split` per row.
        pages: int64, page numbers of all sequences.
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
        """Return memory for the partial results of split rows, float32 [segments, heads, 2 + dim].

        All layers with the same `heads` and `dim` share the memory. Captured graphs keep the address, so the memory is
        never replaced.
        """
        if (heads, dim) not in self._partials:
            partials = np.zeros(
                (self._spans, heads, 2 + dim), dtype=np.float32
            )  # pages become resident on the first write
            self._partials[heads, dim] = torch.from_numpy(partials)
        return self._partials[heads, dim]

    def lay(self, batch: Batch) -> None:
        """Fill the tables for a batch."""
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


def _fill(table: Tensor, values: list[Tile] | list[Split] | list[int]) -> None:
    if values:
        table.numpy()[: len(values)] = values
