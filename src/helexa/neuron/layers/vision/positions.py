"""Positions of patches: their order, learned position embeddings, and rotary tables."""

import torch
from torch import Tensor

from helexa.neuron.ops.protocol import Ops
from helexa.neuron.vision.preprocessing.layout import Grid


def block_order(grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each patch of a grid, each int64 [P], in the order of blocks.

    The blocks of `merge` x `merge` patches are in the order of rows, and so are the patches of a block.
    """
    shape = (grid.rows // merge, merge, grid.columns // merge, merge)
    rows = torch.arange(grid.rows)[:, None].expand(grid)
    columns = torch.arange(grid.columns).expand(grid)
    by_block = (places.reshape(shape).transpose(1, 2).flatten() for places in (rows, columns))
    row_ids, column_ids = by_block
    return row_ids, column_ids


def axial_tables(ops: Ops, rows: Tensor, columns: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin tables, each float32 [P, dim / 2], of a rotary embedding with two axes.

    The first half of the columns rotates by the row of a patch, and the second half by its column.

    Args:
        rows: row of each patch, [P].
        columns: column of each patch, [P].
        dim: size of a head.
        theta: base of the frequencies.
    """
    half = dim // 2
    frequencies = (theta ** -(torch.arange(0, half, 2, dtype=torch.float64) / half)).float().to(ops.device)
    axes = [ops.rope_tables(ids.int().to(ops.device), frequencies) for ids in (rows, columns)]
    cos, sin = (torch.cat(tables, dim=1) for tables in zip(*axes, strict=True))
    return cos, sin


def interpolated(table: Tensor, side: int, grid: Grid, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the learned position embeddings, float32 [P, H], of patches, interpolated from a square table.

    The interpolation is bilinear. The corners of the grid of patches have the embeddings of the corners of the table.
    Reference: transformers `get_vision_interpolation_indices_and_weights`.

    Args:
        table: [side * side, H].
        rows: row of each patch in the grid, [P].
        columns: column of each patch in the grid, [P].
    """
    row_places, row_shares = _neighbors(rows, grid.rows, side)
    column_places, column_shares = _neighbors(columns, grid.columns, side)
    total = torch.zeros(len(rows), table.shape[1], device=table.device)
    for row in range(2):
        for column in range(2):
            places = row_places[row] * side + column_places[column]
            shares = row_shares[row] * column_shares[column]
            total += table[places.to(table.device)] * shares[:, None].to(table.device)
    return total


def _neighbors(index: Tensor, size: int, side: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the two nearest entries of a table with `side` entries for each place in `index`, and their shares.

    The places are from 0 to `size` - 1.
    """
    place = index.float() * (side - 1) / max(size - 1, 1)
    before = place.floor()
    share = place - before
    return (before.long(), (before.long() + 1).clamp(max=side - 1)), (1 - share, share)
