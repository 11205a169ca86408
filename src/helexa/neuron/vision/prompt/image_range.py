"""The image tokens of a prompt, one for each embedding of an image."""

from collections.abc import Sequence
from typing import NamedTuple

from helexa.neuron.vision.image_error import ImageError
from helexa.neuron.vision.preprocessing.layout import ImageLayout


class ImageRange(NamedTuple):
    """Consecutive image tokens, one for each embedding of a tile.

    Attributes:
        image: index of the image in the prompt.
        first: index of the tile's first embedding among the embeddings of the image.
        start: index of the first image token in the prompt.
        length: number of image tokens.
    """

    image: int
    first: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Index of the token after the range."""
        return self.start + self.length


def expanded_index(index: int, ranges: Sequence[ImageRange]) -> int:
    """Return the index of a token after `expanded_tokens`, from its index before.

    Args:
        ranges: the ranges that `expanded_tokens` returned.
    """
    for image_range in ranges:
        if image_range.start >= index:
            break
        index += image_range.length - 1
    return index


def expanded_tokens(
    tokens: Sequence[int], image_token: int, layouts: Sequence[ImageLayout]
) -> tuple[list[int], list[ImageRange]]:
    """Repeat each image token of a prompt as often as its tile has embeddings.

    Args:
        tokens: token ids of a prompt with one image token per tile (see `ImageText`).
        image_token: id of the image token.
        layouts: layout of each image in the prompt.

    Returns:
        The token ids of the prompt, and the range of each tile.

    Raises:
        ImageError: the number of image tokens is not the number of tiles, because the text of a message contains the
            image token.
    """
    tiles = [(image, tile_tokens) for image, layout in enumerate(layouts) for tile_tokens in layout.tokens_per_tile]
    places = [place for place, token in enumerate(tokens) if token == image_token]
    if len(places) != len(tiles):
        raise ImageError(
            f"the prompt has {len(places)} image tokens instead of {len(tiles)}; "
            "the text of a message must not contain image tokens"
        )
    expanded: list[int] = []
    ranges: list[ImageRange] = []
    after = 0
    for place, (image, length) in zip(places, tiles, strict=True):
        expanded += tokens[after:place]
        first = ranges[-1].first + ranges[-1].length if ranges and ranges[-1].image == image else 0
        ranges.append(ImageRange(image, first, len(expanded), length))
        expanded += [image_token] * length
        after = place + 1
    return [*expanded, *tokens[after:]], ranges
