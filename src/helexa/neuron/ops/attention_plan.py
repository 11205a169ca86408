"""Which queries of a batch attend together and who does it, as the attention kernels read it."""

import numpy as np

from helexa.neuron.ops.batch import Batch, Capacity
from helexa.neuron.ops.constants import PAGE_SIZE

_SPAN = 512  # positions, as in attention.c
_TILE = 24  # queries that go through a page together
_SPLIT_ROWS = 8


class AttentionPlan:
    """Tables that stay where they are from step to step, for layers with `group` query heads per KV head.

    Attributes:
        addresses: of the counts, the tiles and the page numbers.
        splits_address: of the rows whose spans are shared out among threads.
    """

    def __init__(self, capacity: Capacity, group: int) -> None:
        self._rows_per_tile = max(_TILE // group, 1)
        self._spans = -(-capacity.pages_per_sequence * PAGE_SIZE // _SPAN) * _SPLIT_ROWS
        self._counts = np.zeros(2, dtype=np.int64)
        self._tiles = np.zeros((capacity.rows + self._spans, 7), dtype=np.int64)
        self._splits = np.zeros((_SPLIT_ROWS, 3), dtype=np.int64)
        self._pages = np.zeros(capacity.sequences * capacity.pages_per_sequence, dtype=np.int64)
        self._partials: dict[tuple[int, int], np.ndarray] = {}
        self.addresses = (self._counts.ctypes.data, self._tiles.ctypes.data, self._pages.ctypes.data)
        self.splits_address = self._splits.ctypes.data

    def partials(self, heads: int, dim: int) -> int:
        """Return the address of room for the partial results of split rows, which all layers of these sizes share.

        Recorded steps keep the address, so the room for one size is never replaced.
        """
        if (heads, dim) not in self._partials:
            self._partials[heads, dim] = np.zeros((self._spans, heads, 2 + dim), dtype=np.float32)
        return self._partials[heads, dim].ctypes.data

    def lay(self, batch: Batch) -> None:
        """Fill the tables for a batch."""
        tiles: list[tuple[int, ...]] = []
        splits: list[tuple[int, int, int]] = []
        pages: list[int] = []
        together = self._rows_per_tile
        few = len(batch.span_list) <= _SPLIT_ROWS
        partial = 0
        for span, own in zip(batch.span_list, batch.host_spans.pages, strict=True):
            first_page = len(pages)
            pages += own[: -(-(span.prefix + span.stop - span.start) // PAGE_SIZE)].tolist()
            count = span.stop - span.start
            for start in range(0, count, together):
                rows, position = min(together, count - start), span.prefix + start
                spans = -(-(position + rows) // _SPAN)
                row = span.start + start
                if few and count == 1 and spans > 1:
                    splits.append((row, partial, spans))
                    tiles += [(row, 1, position, first_page, s, 1, partial + s) for s in range(spans)]
                    partial += spans
                else:
                    tiles.append((row, rows, position, first_page, 0, spans, -1))
        self._counts[:] = len(tiles), len(splits)
        self._tiles[: len(tiles)] = tiles
        self._pages[: len(pages)] = pages
        if splits:
            self._splits[: len(splits)] = splits
