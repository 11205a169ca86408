"""The size of an image after resizing, and its division into tiles and patches."""

from typing import NamedTuple

import msgspec

MAX_PATCHES = 1 << 16
"""Maximum number of patches of one image: larger than in any real model, but small enough to bound memory."""


class Grid(NamedTuple):
    """Number of rows and number of columns of a grid."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of cells."""
        return self.rows * self.columns


class ImageLayout(msgspec.Struct, frozen=True):
    """The division of an image into tiles and patches.

    A patch is a square of pixels and one input row of the vision tower. A tile is a rectangle of patches. The vision
    tower encodes each tile separately. Most models have one tile per image.

    Attributes:
        sizes: sizes (width, height) in pixels to which the image is resized, one after the other.
        tiles: grid of patches of each tile.
        tokens: number of embeddings that the vision tower computes for the image.
        split: rows and columns of tiles, if the image is split into several tiles and an overview of the whole image,
            which is the last tile. 0 x 0 if the image is not split.
    """

    sizes: tuple[tuple[int, int], ...]
    tiles: tuple[Grid, ...]
    tokens: int
    split: Grid = Grid(0, 0)

    @property
    def patches(self) -> int:
        """Number of patches of all tiles."""
        return sum(tile.size for tile in self.tiles)

    @property
    def tokens_per_tile(self) -> tuple[int, ...]:
        """Number of embeddings of each tile."""
        return tuple(self.tokens * tile.size // self.patches for tile in self.tiles)
