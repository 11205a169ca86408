"""Rotary positions and attention of the tokens in a prompt with images."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helexa.neuron.vision.layout import ImageLayout, ImageRange


def attention_ends(length: int, ranges: Sequence[ImageRange]) -> NDArray[np.int32]:
    """Return the end of the positions that each token attends to, int32 [length]."""
    # A text token attends to itself and to the tokens before it. An image token of Gemma 3 attends to all tokens of its
    # image and to the tokens before the image, so a prefill step must contain all tokens of the image. A sliding window
    # excludes tokens at the beginning, as in a text, and does not change the number that this function returns.
    ends = np.arange(1, length + 1, dtype=np.int32)
    for image_range in ranges:
        ends[image_range.start : image_range.end] = image_range.end
    return ends


class MropePositions(NamedTuple):
    """The positions of the tokens of a prompt, and of the tokens after it."""

    positions: NDArray[np.int32]  # int32 [3, T], the time, the height and the width of each of the T tokens
    delta: int  # number to add to the index of a token after the prompt to get its position on each axis; at most 0


def mrope_positions(
    length: int, ranges: Sequence[ImageRange], layouts: Sequence[ImageLayout], merge: int
) -> MropePositions:
    """Return the positions of a prompt of `length` tokens.

    The tokens of an image share one time. Their heights and widths are their row and column, counted from this time.
    `merge` is the number of rows (and columns) of patches that the vision tower merges into one embedding.
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
        # The next token is after the longer side of the image.
        token, position = image_range.end, position + max(rows, columns)
    return MropePositions(positions, _count(positions[:, token:], position) - length)


def _count(positions: NDArray[np.int32], first: int) -> int:
    """Write the positions of a text from `first` on, and return the next position."""
    positions[:] = first + np.arange(positions.shape[1])
    return first + positions.shape[1]
