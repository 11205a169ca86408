"""The image processor of a model, and the preparation of one image with it."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from helexa.neuron.vision.image_error import ImageError
from helexa.neuron.vision.preprocessing.decode import ImageLimits, decode
from helexa.neuron.vision.preprocessing.gemma3 import Gemma3Processor
from helexa.neuron.vision.preprocessing.idefics3 import Idefics3Processor
from helexa.neuron.vision.preprocessing.layout import MAX_PATCHES, ImageLayout
from helexa.neuron.vision.preprocessing.qwen_vl import QwenVlProcessor

ImageProcessor = QwenVlProcessor | Gemma3Processor | Idefics3Processor
"""The image processor of a model. Each type has the methods `layout` and `tiles`, and the attributes of `Pixels`."""

Allocate = Callable[[tuple[int, int]], NDArray[np.float32]]
"""Function that returns an uninitialized array of the given shape."""


@dataclass(frozen=True)
class PreparedImage:
    """The input of the vision tower for one image.

    Attributes:
        width: width of the image in pixels, before it was resized.
        height: height of the image in pixels, before it was resized.
        layout: tiles and patches of the image, and number of its tokens.
        pixels: float32 [P, 3 * patch_size ** 2], the normalized values of the P patches of all tiles, one tile after
            another. The values of a patch are in the order channel, row, column.
        digest: SHA-256 digest. Two images have the same digest only if `layout` and `pixels` are the same, and the
            settings of the image processor.
    """

    width: int
    height: int
    layout: ImageLayout
    pixels: NDArray[np.float32]
    digest: bytes


def prepare(
    data: bytes, processor: ImageProcessor, limits: ImageLimits, max_tokens: int, allocate: Allocate
) -> PreparedImage:
    """Decode and resize an image, and return its patches and digest.

    Args:
        data: contents of the image file.
        max_tokens: maximum number of tokens of the image. A larger image is shrunk. If the model has a minimum number
            of tokens per image, the image may have this number of tokens.
        allocate: function that allocates the memory for `PreparedImage.pixels`.

    Raises:
        ImageError: the image cannot be used; the message gives the reason.
    """
    image = decode(data, limits)
    layout = image_layout(processor, image.width, image.height, max_tokens)
    pixels = allocate((layout.patches, processor.patch_values))
    digest = hashlib.sha256(msgspec.json.encode(("RGB", layout, processor)))
    first = 0
    for tile, grid in zip(processor.tiles(image, layout), layout.tiles, strict=True):
        patches = processor.patches(tile)
        digest.update(patches.data)
        processor.normalize(patches, pixels[first : first + grid.size])
        first += grid.size
    return PreparedImage(image.width, image.height, layout, pixels, digest.digest())


def image_layout(processor: ImageProcessor, width: int, height: int, max_tokens: int) -> ImageLayout:
    """Return the layout of an image of `width` x `height` pixels with at most `max_tokens` tokens (see `prepare`).

    Raises:
        ImageError: the model cannot read images with this aspect ratio, or the image would have too many patches.
    """
    layout = processor.layout(width, height, max_tokens)
    if not 0 < layout.patches <= MAX_PATCHES:
        raise ImageError(f"the image has {layout.patches} patches after resizing, and the limit is {MAX_PATCHES}")
    return layout
