"""Image processor of Qwen2.5-VL, Qwen3-VL and Qwen3.5, whose images keep their aspect ratio.

Reference: transformers `image_processing_pil_qwen2_vl`. A still image fills both time steps of a patch of the
reference. The patches here contain the time step once, and the vision tower adds the weights of both time steps.
"""

import math
from typing import Annotated

from msgspec import Meta
from PIL import Image

from helexa.neuron.vision.image_error import ImageError
from helexa.neuron.vision.preprocessing.layout import Grid, ImageLayout
from helexa.neuron.vision.preprocessing.pixels import Pixels

_MAX_ASPECT_RATIO = 200


class QwenVlProcessor(Pixels, frozen=True, kw_only=True, tag="qwen_vl"):
    """Resizes an image to a multiple of a block of patches, with its aspect ratio.

    A block of `merge` x `merge` patches becomes one token.

    Attributes:
        min_pixels: number of pixels to which a smaller image is enlarged.
        max_pixels: number of pixels to which a larger image is shrunk.
    """

    min_pixels: Annotated[int, Meta(ge=1)]
    max_pixels: Annotated[int, Meta(ge=1)]

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return the layout of an image of `width` x `height` pixels with at most `max_tokens` tokens.

        Raises:
            ImageError: one side of the image is more than 200 times as long as the other side.
        """
        block = self.patch_size * self.merge
        max_pixels = min(self.max_pixels, max_tokens * block**2)
        min_pixels = min(self.min_pixels, max_pixels)
        resized_height, resized_width = smart_resize(height, width, block, min_pixels, max_pixels)
        rows, columns = resized_height // block, resized_width // block
        if rows * columns > max_tokens:
            rows, columns = _largest(height / block, width / block, max_tokens)
        grid = Grid(rows * self.merge, columns * self.merge)
        return ImageLayout(((columns * block, rows * block),), (grid,), rows * columns)

    def tiles(self, image: Image.Image, layout: ImageLayout) -> list[Image.Image]:
        """Return the resized image as the only tile."""
        return [self.resized(image, *layout.sizes)]


def smart_resize(height: int, width: int, block: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width, multiples of `block`, to which an image is resized.

    The number of pixels is between `min_pixels` and `max_pixels`, unless a side would become shorter than `block`.

    Raises:
        ImageError: one side of the image is more than 200 times as long as the other side.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise ImageError(
            f"the image has {width} x {height} pixels; one side may be at most {_MAX_ASPECT_RATIO} times as long as "
            "the other side"
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
    """Return the size of the largest grid of about the ratio `rows` : `columns` that has at most `most` cells."""
    shrink = math.sqrt(rows * columns / most)
    whole_rows = min(max(math.floor(rows / shrink), 1), most)
    return whole_rows, min(max(math.floor(columns / shrink), 1), most // whole_rows)
