"""Sizes of images and their tokens in a prompt, without numpy."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from helexa.core.errors import HelexaError

MAX_PATCHES = 1 << 16  # maximum number of patches of one image, more than any real model has


class ImageError(HelexaError):
    """An image of a request cannot be used. The message is one line for the client."""


class PixelMemoryError(ImageError):
    """An `ImageError`: the pixels of running requests need too much memory now."""


class Grid(NamedTuple):
    """Number of rows and of columns of a grid, such as a grid of patches."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of cells."""
        return self.rows * self.columns


class ImageLayout(msgspec.Struct, frozen=True):
    """The division of an image into tiles and patches, and the resulting tokens.

    A patch is a square of pixels and one input row of the vision tower. A tile is a rectangle of patches, which the
    vision tower encodes separately. Most models have one tile per image.
    """

    # sizes (width, height) in pixels to which the image is resized, one after the other
    sizes: tuple[tuple[int, int], ...]
    tiles: tuple[Grid, ...]  # grid of patches of each tile
    tokens: int  # number of embeddings that the vision tower computes for the image
    # Rows and columns of the tiles, without the last tile, which is an overview of the image. 0 x 0 if there is no
    # overview.
    split: Grid = Grid(0, 0)
    # number of rows of tokens of each tile, if the prompt has other tokens between the rows; else 1
    rows: int = 1

    @property
    def patches(self) -> int:
        """Number of patches of all tiles."""
        return sum(tile.size for tile in self.tiles)

    @property
    def ranges(self) -> tuple[int, ...]:
        """Length of each range of adjacent image tokens: one range per tile or tile row."""
        by_tile = (self.tokens * tile.size // self.patches for tile in self.tiles)
        return tuple(tokens // self.rows for tokens in by_tile for _ in range(self.rows))


class ImageRange(NamedTuple):
    """Adjacent image tokens of a tile, one for each embedding."""

    image: int  # index of the image in the prompt
    first: int  # index of the range's first embedding among the embeddings of the image
    start: int  # index of the first image token in the prompt
    length: int  # number of image tokens

    @property
    def end(self) -> int:
        """Index of the token after the range."""
        return self.start + self.length


def expanded_index(index: int, ranges: Sequence[ImageRange]) -> int:
    """Map the index of a token in the original prompt to the expanded prompt.

    Args:
        index: index of the token in the prompt before `expanded_tokens`.
        ranges: the ranges that `expanded_tokens` returned.
    """
    for image_range in ranges:
        if image_range.start >= index:
            break
        index += image_range.length - 1
    return index


def unexpanded_tokens(tokens: Sequence[int], ranges: Sequence[ImageRange]) -> list[int]:
    """Undo `expanded_tokens`: return the prompt with one image token per range."""
    repeated = {index for image_range in ranges for index in range(image_range.start + 1, image_range.end)}
    return [token for index, token in enumerate(tokens) if index not in repeated]


def expanded_tokens(
    tokens: Sequence[int], image_token: int, layouts: Sequence[ImageLayout]
) -> tuple[list[int], list[ImageRange]]:
    """Repeat each image token of a prompt as often as its range has embeddings.

    The prompt `tokens` has one token `image_token` for each of `ImageLayout.ranges`. Return the new prompt, and the
    ranges of image tokens in it.

    Raises:
        ImageError: the number of image tokens is not the number of ranges, because the text of a message contains the
            token.
    """
    wanted = [(image, length) for image, layout in enumerate(layouts) for length in layout.ranges]
    places = [place for place, token in enumerate(tokens) if token == image_token]
    if len(places) != len(wanted):
        raise ImageError(
            f"the prompt has {len(places)} image tokens instead of {len(wanted)}; "
            "remove the image tokens from the text of the messages"
        )
    expanded: list[int] = []
    ranges: list[ImageRange] = []
    after = 0
    for place, (image, length) in zip(places, wanted, strict=True):
        expanded += tokens[after:place]
        first = ranges[-1].first + ranges[-1].length if ranges and ranges[-1].image == image else 0
        ranges.append(ImageRange(image, first, len(expanded), length))
        expanded += [image_token] * length
        after = place + 1
    return [*expanded, *tokens[after:]], ranges
