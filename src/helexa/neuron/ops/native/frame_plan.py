"""Work list of the native attention kernel for frames: rows that attend to all rows of their frame."""

from collections.abc import Sequence

import torch

from helexa.neuron.ops.constants import PAGE_SIZE, SEGMENT_POSITIONS
from helexa.neuron.ops.native.attention_plan import Tile

_ROWS = 24  # rows per tile


class FramePlan:
    """The tiles of the attention kernel for frames of the given lengths, and the places of their keys and values.

    The kernel reads keys and values from pages as in a KV cache. Each frame begins with a new page.

    Args:
        lengths: number of rows of each frame.

    Attributes:
        tile_count: int64 [1], number of tiles.
        tiles: int64 [tile_count, 8], one `Tile` per line.
        pages: int64, the numbers of all pages.
        slots: int32 [T], place of each row: page * PAGE_SIZE + offset in the page.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        tiles: list[Tile] = []
        slots: list[torch.Tensor] = []
        page = row = 0
        for length in lengths:
            segments = -(-length // SEGMENT_POSITIONS)
            for start in range(0, length, _ROWS):
                rows = min(_ROWS, length - start)
                tiles.append(Tile(row + start, rows, start, page, 0, segments, -1, length))
            slots.append(torch.arange(page * PAGE_SIZE, page * PAGE_SIZE + length, dtype=torch.int32))
            row += length
            page += -(-length // PAGE_SIZE)
        self.tile_count = torch.tensor([len(tiles)])
        self.tiles = torch.tensor(tiles, dtype=torch.int64)
        self.pages = torch.arange(page)
        self.slots = torch.cat(slots)
