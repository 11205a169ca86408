"""The images of a prompt, as the scheduler and the step builder need them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from struct import pack
from typing import NamedTuple

import msgspec
import numpy as np

from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.engine.step_input_and_graph_sizes import Int32, int32
from helexa.neuron.vision.image_tokens_and_errors import ImageLayout, ImageRange


class ImageTraits(msgspec.Struct, frozen=True):
    """How a model treats the image tokens of a prompt."""

    # Number of rows of patches, and of columns, that become one image token. Only set for models whose image tokens
    # have positions with three axes (M-RoPE). 0 if image tokens have the positions of text.
    merge: int = 0
    # Whether an image token attends to all tokens of its image. All tokens of an image that are not computed yet must
    # then be computed in the same step.
    whole: bool = False


TEXT_TRAITS = ImageTraits()


class PromptImages:
    """Where the image tokens of a prompt are, and which images begin in a chunk."""

    def __init__(self, request: Generate, traits: ImageTraits) -> None:
        self.ranges = request.image_ranges  # the image tokens of each tile, in the order of the prompt
        self.digests = [image.digest for image in request.images]
        self.delta = 0  # number to add to the index of a token after the last image to get the position of the token
        self._traits = traits
        self._tokens = [image.layout.tokens for image in request.images]
        self._ends = [image_range.end for image_range in self.ranges]
        self._positions: Int32 | None = None
        if traits.merge:
            layouts = [image.layout for image in request.images]
            self._positions, self.delta = mrope_positions(self._ends[-1], self.ranges, layouts, traits.merge)

    def positions(self, start: int, stop: int) -> Int32 | None:
        """Return the positions of tokens `start` to `stop` (exclusive), int32 [3, n].

        Return None if the position of each token is its index plus `delta`, on all axes.
        """
        # Without M-RoPE, and after the last image, positions are those of text.
        if self._positions is None or start >= self._ends[-1]:
            return None
        after = int32(range(max(start, self._ends[-1]), stop)) + self.delta
        before = self._positions[:, start:stop]
        return int32([[*axis, *after] for axis in before]) if len(after) else before

    def overlapping(self, start: int, stop: int) -> Iterator[ImageRange]:
        """Yield the image ranges with tokens from index `start` to `stop` (exclusive)."""
        for index in range(bisect_right(self._ends, start), len(self.ranges)):
            if self.ranges[index].start >= stop:
                return
            yield self.ranges[index]

    def attention_ends(self, start: int, stop: int) -> Int32 | None:
        """Return how many tokens each token from `start` to `stop` attends to, int32 [n].

        Return None if each token attends only to itself and to the tokens before it.
        """
        overlapping = list(self.overlapping(start, stop)) if self._traits.whole else []
        if not overlapping:
            return None
        # A sliding window excludes only tokens before a position, as in a text, so it does not change the ends.
        ends = int32(range(start + 1, stop + 1))
        for image_range in overlapping:
            ends[max(image_range.start - start, 0) : image_range.end - start] = image_range.end
        return ends

    def begun(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (first index, number of tokens) of each image that begins in a chunk.

        The chunk has the tokens of the prompt from `start` to `stop` (exclusive).
        """
        for image_range in self.overlapping(start, stop):
            # An image may have several ranges (tiles). Its first range has the image's first token.
            if not image_range.first and image_range.start >= start:
                yield image_range.start, self._tokens[image_range.image]

    def chunk_end(self, start: int, stop: int) -> int:
        """Return `stop`, moved so that the chunk from `start` cuts no indivisible image."""
        if not self._traits.whole:
            return stop
        for image_range in self.overlapping(stop - 1, stop):
            if image_range.start < stop < image_range.end:
                # The chunk ends before the image, or contains all of it if it would be empty otherwise.
                return image_range.start if image_range.start > start else image_range.end
        return stop

    def key(self, start: int, stop: int) -> bytes:
        """Return bytes that identify the image tokens from `start` to `stop` (exclusive)."""
        key = b""
        for image_range in self.overlapping(start, stop):
            first = max(image_range.start, start)
            # The key contains the offset in the image, because two pages may have different parts of one image.
            place = image_range.first + first - image_range.start
            key += pack("<III", first - start, place, min(image_range.end, stop) - first)
            key += self.digests[image_range.image]
        return key


class MropePositions(NamedTuple):
    """The positions of the tokens of a prompt, and of the tokens after it."""

    positions: Int32  # int32 [3, T], the time, the height and the width of each of the T tokens
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


def _count(positions: Int32, first: int) -> int:
    """Fill `positions` with the numbers from `first` on, and return the next number."""
    positions[:] = first + np.arange(positions.shape[1])
    return first + positions.shape[1]
