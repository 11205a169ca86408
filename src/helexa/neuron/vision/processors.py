"""Image processors of model families: pixels become the vision tower's input."""

import itertools
import math
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from PIL import Image

from helexa.neuron.vision.image_tokens_and_errors import Grid, ImageError, ImageLayout

CHANNELS = 3

Size = Annotated[int, Meta(ge=1, le=1 << 15)]  # a number of pixels or patches along one side of an image

Mean = Annotated[float, Meta(ge=-1, le=1)]
Factor = Annotated[float, Meta(gt=0, le=10)]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

_MAX_LENGTH = 4096  # maximum number of pixels of the longest side after the first resizing

# From Qwen2-VL's image processor, which rejects narrower images.
_MAX_ASPECT_RATIO = 200


class Pixels(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an image processor: the conversion of pixels to patches."""

    patch_size: Size  # number of pixels along one side of a patch
    # Number of patches along one side of a block. The patches of a block are adjacent rows of the tower's input.
    merge: Size = 1
    # Pillow's number of the filter for resizing: 1 is Lanczos, 2 is bilinear, 3 is bicubic
    resample: Annotated[int, Meta(ge=1, le=3)] = Image.Resampling.BICUBIC
    # A stored value from 0 to 255 becomes (value * factor - mean) / std. `mean` and `std` have one number per channel.
    mean: tuple[Mean, Mean, Mean] = HALF
    std: tuple[Factor, Factor, Factor] = HALF
    factor: Factor = 1 / 255

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return CHANNELS * self.patch_size**2

    def resized(self, image: Image.Image, *sizes: tuple[int, int]) -> Image.Image:
        """Return `image`, resized to each of `sizes` (width, height), one after the other."""
        for size in sizes:
            image = image.resize(size, Image.Resampling(self.resample))
        return image

    def tiles(self, image: Image.Image, layout: ImageLayout) -> list[Image.Image]:
        """Return the resized image as the only tile."""
        return [self.resized(image, *layout.sizes)]

    def layout_of(self, rows: int, columns: int) -> ImageLayout:
        """Return the layout of an image that becomes `rows` x `columns` whole blocks."""
        side, grid = self.patch_size * self.merge, Grid(rows * self.merge, columns * self.merge)
        return ImageLayout(((columns * side, rows * side),), (grid,), rows * columns)

    def patches(self, tile: Image.Image) -> NDArray[np.uint8]:
        """Return the patches of a tile as stored values, [patches, channel, row, column].

        Pixels after the last whole patch of a row or column are ignored. Patches are in the order of rows, or, with
        `merge`, in the order of blocks of `merge` x `merge` patches.
        """
        size, merge = self.patch_size, self.merge
        rows, columns = (length // (size * merge) for length in (tile.height, tile.width))
        pixels = np.asarray(tile)[: rows * merge * size, : columns * merge * size]
        blocks = pixels.reshape(rows, merge, size, columns, merge, size, CHANNELS)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, CHANNELS, size, size)

    def normalize(self, patches: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Write normalized patches [patches, channel, row, column] as rows of `out`."""
        table = self._table()
        channels = out.reshape(patches.shape)
        for channel in range(CHANNELS):
            channels[:, channel] = table[channel][patches[:, channel]]

    def _table(self) -> NDArray[np.float32]:
        """Return the normalized value of each stored value, [channel, 256]."""
        # The steps and dtypes are those of transformers, so the results are equal bit for bit.
        scaled = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        return (scaled - mean) / std


class Gemma3Processor(Pixels, frozen=True, kw_only=True, tag="gemma3"):
    """Resizes an image to a fixed size, without regard to its aspect ratio."""

    # size of the resized image in pixels
    height: Size
    width: Size
    tokens: Size  # number of tokens of every image

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return the layout, which depends neither on the size nor on `max_tokens`."""
        grid = Grid(self.height // self.patch_size, self.width // self.patch_size)
        return ImageLayout(((self.width, self.height),), (grid,), self.tokens)


class Idefics3Processor(Pixels, frozen=True, kw_only=True, tag="idefics3"):
    """Splits an image into square tiles, and adds an overview as the last tile."""

    longest_edge: Size  # number of pixels to which the longest side of an image is resized before the image is split
    tile: Size  # number of pixels along one side of a tile
    tokens_per_tile: Size  # number of tokens of a tile
    split: bool = True  # whether images are split. If False, every image is one tile.

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return the layout with the most tiles that `max_tokens` permits, or one tile."""
        # A smaller image has fewer tiles, and each tile has the same number of tokens.
        for longest_edge in range(self.longest_edge, self.tile, -self.tile):
            layout = self._layout(width, height, longest_edge)
            if layout.tokens <= max_tokens or not layout.split.size:
                return layout
        # At least one tile, even if a tile has more than `max_tokens` tokens.
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
    """Scale a size so that its longest side has `longest_edge` pixels, at most 4096.

    Return the new width and height.
    """
    # The order of the floating-point operations is that of transformers, so the results are equal.
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
    """Return the rows and columns of tiles that cover an image."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    return Grid(max(rows, 1), max(columns, 1))


class QwenVlProcessor(Pixels, frozen=True, kw_only=True, tag="qwen_vl"):
    """Resizes an image to a multiple of a block of patches, with its aspect ratio.

    A block of `merge` x `merge` patches becomes one token.
    """

    min_pixels: Annotated[int, Meta(ge=1)]  # number of pixels to which a smaller image is enlarged
    max_pixels: Annotated[int, Meta(ge=1)]  # number of pixels to which a larger image is shrunk

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return a layout with at most `max_tokens` tokens for a `width` x `height` image.

        Raises:
            ImageError: one side of the image is more than 200 times as long as the other side.
        """
        block = self.patch_size * self.merge
        max_pixels = min(self.max_pixels, max_tokens * block**2)
        min_pixels = min(self.min_pixels, max_pixels)
        resized_height, resized_width = smart_resize(height, width, block, min_pixels, max_pixels)
        rows, columns = resized_height // block, resized_width // block
        # Rounding to whole blocks may exceed the limit.
        if rows * columns > max_tokens:
            rows, columns = _largest(height / block, width / block, max_tokens)
        return self.layout_of(rows, columns)


class PixtralProcessor(Pixels, frozen=True, kw_only=True, tag="pixtral"):
    """Shrinks an image to a maximum size, and enlarges it to whole blocks of patches.

    A block of `merge` x `merge` patches becomes one token.
    """

    longest_edge: Size  # maximum number of pixels of the longest side

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return a layout with at most `max_tokens` tokens for a `width` x `height` image."""
        block = self.patch_size * self.merge
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            width, height = max(math.floor(width / ratio), 1), max(math.floor(height / ratio), 1)
        rows, columns = -(-height // block), -(-width // block)
        if rows * columns > max_tokens:
            rows, columns = _largest(height / block, width / block, max_tokens)
        grid = Grid(rows * self.merge, columns * self.merge)
        return ImageLayout(((columns * block, rows * block),), (grid,), rows * columns, rows=rows)


class Gemma4Processor(Pixels, frozen=True, kw_only=True, tag="gemma4"):
    """Resizes an image to about the maximum number of tokens, with its aspect ratio.

    A block of `merge` x `merge` patches becomes one token.
    """

    max_tokens: Size  # maximum number of tokens of an image
    side: Size  # maximum number of blocks along one side

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return a layout with at most `max_tokens` tokens for a `width` x `height` image."""
        tokens, block = min(self.max_tokens, max_tokens), self.patch_size * self.merge
        # The order of the floating-point operations is that of transformers, so the results are equal.
        factor = math.sqrt(tokens * self.merge**2 * self.patch_size**2 / (height * width))
        rows, columns = math.floor(factor * height / block), math.floor(factor * width / block)
        if rows == 0:
            rows, columns = 1, min(max(width // height, 1), tokens)
        elif columns == 0:
            rows, columns = min(max(height // width, 1), tokens), 1
        rows, columns = min(rows, self.side), min(columns, self.side)
        return self.layout_of(rows, columns)


class MuseGlimmerProcessor(Pixels, frozen=True, kw_only=True, tag="muse_glimmer"):
    """Resizes an image to the grid of whole blocks with the nearest aspect ratio.

    A block of `merge` x `merge` patches becomes one token.
    """

    max_tokens: Size  # maximum number of tokens of an image

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return a layout with at most `max_tokens` tokens for a `width` x `height` image."""
        block, most = self.patch_size * self.merge, min(self.max_tokens, max_tokens)
        # The order of the floating-point operations is that of transformers, so the results are equal.
        rows, columns = height / block, width / block
        ratio = columns / rows
        if rows * columns > most:
            rows = (most / ratio) ** 0.5
            columns = rows * ratio
        counts = [(math.floor(rows), math.ceil(rows)), (math.floor(columns), math.ceil(columns))]
        # As in transformers, the first grid in the set's order wins if the aspect ratios of several grids are equally
        # near.
        grids = [grid for grid in set(itertools.product(*counts)) if min(grid) >= 1 and grid[0] * grid[1] <= most]
        # If an image is so narrow that no grid is valid, one row or column of at most `most` blocks is used.
        grids = grids or [(min(max(1, round(rows)), most), min(max(1, round(columns)), most))]
        return self.layout_of(*min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width)))


def smart_resize(height: int, width: int, block: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return an image's height and width after resizing, both multiples of `block`.

    The number of pixels is only roughly between `min_pixels` and `max_pixels`, because both sides are rounded to whole
    blocks, and have at least one block.

    Raises:
        ImageError: one side of the image is more than 200 times as long as the other side.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise ImageError(
            f"the image has {width} x {height} pixels; one side may be at most {_MAX_ASPECT_RATIO} times as long as "
            "the other side; crop the image"
        )
    rows, columns = round(height / block) * block, round(width / block) * block
    if rows * columns > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(block, math.floor(height / shrink / block) * block)
        columns = max(block, math.floor(width / shrink / block) * block)
    elif rows * columns < min_pixels:
        enlarge = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * enlarge / block) * block
        columns = math.ceil(width * enlarge / block) * block
    return rows, columns


def _largest(rows: float, columns: float, most: int) -> tuple[int, int]:
    """Return the largest grid of ratio `rows` : `columns` with at most `most` cells.

    The ratio is rounded, because the result has whole rows and columns.
    """
    shrink = math.sqrt(rows * columns / most)
    whole_rows = min(max(math.floor(rows / shrink), 1), most)
    return whole_rows, min(max(math.floor(columns / shrink), 1), most // whole_rows)
