"""Positions of a prompt with images along three axes (M-RoPE; Wang et al., 2024)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helexa.neuron.vision.preprocessing.layout import ImageLayout
from helexa.neuron.vision.prompt.image_range import ImageRange


class MropePositions(NamedTuple):
    """The positions of the tokens of a prompt, and of the tokens after it.

    Attributes:
        positions: int32 [3, T], the time, the height and the width of each of the T tokens.
        delta: number to add to the index of a token after the prompt to get its position, which is the same on each
            axis. The number is not positive.
    """

    positions: NDArray[np.int32]
    delta: int


def mrope_positions(
    length: int, ranges: Sequence[ImageRange], layouts: Sequence[ImageLayout], merge: int
) -> MropePositions:
    """Return the positions of a prompt of `length` tokens.

    The tokens of an image share one time. Their heights and widths are their row and column, counted from this time.
    The position of the next token is the largest position of the image, or of a square around it, plus 1.

    Args:
        ranges: image tokens of the prompt. Each image has one range.
        layouts: layout of each image.
        merge: number of rows of patches, and of columns of patches, that the vision tower merges into one embedding.
    """
    positions = np.empty((3, length), np.int32)
    token = position = 0
    for image_range in ranges:
        position = _count(positions[:, token : image_range.start], position)
        tile = layouts[image_range.image].tiles[0]
        rows, columns = tile.rows // merge, tile.columns // merge
        image = positions[:, image_range.start : image_range.end].reshape(3, rows, columns)
        image[0] = position
        image[1] = position + np.arange(rows)[:, None]
        image[2] = position + np.arange(columns)
        token, position = image_range.end, position + max(rows, columns)
    return MropePositions(positions, _count(positions[:, token:], position) - length)


def _count(positions: NDArray[np.int32], first: int) -> int:
    """Write the positions of a text that begins at position `first`, and return the position after it."""
    positions[:] = first + np.arange(positions.shape[1])
    return first + positions.shape[1]
