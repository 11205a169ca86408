"""Image processor of Idefics3 and SmolVLM, which splits a large image into square tiles.

Reference: transformers `image_processing_pil_idefics3`.
"""

import math

from PIL import Image

from helexa.neuron.vision.preprocessing.layout import Grid, ImageLayout
from helexa.neuron.vision.preprocessing.pixels import Pixels, Size

_MAX_LENGTH = 4096  # pixels of the longest side after the first resizing


class Idefics3Processor(Pixels, frozen=True, kw_only=True, tag="idefics3"):
    """Splits an image into square tiles, and adds an overview of the whole image as the last tile.

    Attributes:
        longest_edge: number of pixels to which the longest side of an image is resized before the image is split.
        tile: number of pixels along one side of a tile.
        tokens_per_tile: number of tokens of a tile.
        split: whether images are split. If False, every image is one tile.
    """

    longest_edge: Size
    tile: Size
    tokens_per_tile: Size
    split: bool = True

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return the layout of an image of `width` x `height` pixels with at most `max_tokens` tokens.

        The layout has at least one tile, even if a tile has more than `max_tokens` tokens.
        """
        for longest_edge in range(self.longest_edge, self.tile, -self.tile):
            layout = self._layout(width, height, longest_edge)
            if layout.tokens <= max_tokens or not layout.split.size:
                return layout
        return self._layout(width, height, min(self.longest_edge, self.tile))

    def _layout(self, width: int, height: int, longest_edge: int) -> ImageLayout:
        first = _first_size(width, height, longest_edge)
        split = _split(*first, self.tile) if self.split else Grid(1, 1)
        tiles = split.size + 1 if split.size > 1 else 1
        grid = Grid(self.tile // self.patch_size, self.tile // self.patch_size)
        size = split.columns * self.tile, split.rows * self.tile
        tokens = tiles * self.tokens_per_tile
        return ImageLayout((first, size), (grid,) * tiles, tokens, split if tiles > 1 else Grid(0, 0))

    def tiles(self, image: Image.Image, layout: ImageLayout) -> list[Image.Image]:
        """Return the tiles of an image row by row, then the overview."""
        image, side = self.resized(image, *layout.sizes), self.tile
        if not layout.split.size:
            return [image]
        tiles = [
            image.crop((left, top, left + side, top + side))
            for top in range(0, image.height, side)
            for left in range(0, image.width, side)
        ]
        return [*tiles, self.resized(image, (side, side))]


def _first_size(width: int, height: int, longest_edge: int) -> tuple[int, int]:
    """Return the width and height with the longest side `longest_edge`, limited to 4096 pixels.

    The order of the floating-point operations is that of transformers, so the results are equal.
    """
    ratio = width / height
    if width >= height:
        width, height = longest_edge, int(longest_edge / ratio)
        height += height % 2
    else:
        width, height = int(longest_edge * ratio), longest_edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_LENGTH:
        width, height = _MAX_LENGTH, int(_MAX_LENGTH / ratio)
    elif height > width and height > _MAX_LENGTH:
        width, height = int(_MAX_LENGTH * ratio), _MAX_LENGTH
    return max(width, 1), max(height, 1)


def _split(width: int, height: int, tile: int) -> Grid:
    """Return the rows and columns of tiles that cover an image, which is stretched to whole tiles."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    return Grid(max(rows, 1), max(columns, 1))
