"""Image processor of Gemma 3, which resizes every image to the same square.

Reference: transformers `image_processing_pil_gemma3`, without pan and scan, which is off by default.
"""

from PIL import Image

from helexa.neuron.vision.preprocessing.layout import Grid, ImageLayout
from helexa.neuron.vision.preprocessing.pixels import Pixels, Size


class Gemma3Processor(Pixels, frozen=True, kw_only=True, tag="gemma3"):
    """Resizes an image to a fixed size, without regard to its aspect ratio.

    Attributes:
        height: height of the resized image in pixels.
        width: width of the resized image in pixels.
        tokens: number of tokens of every image.
    """

    height: Size
    width: Size
    tokens: Size

    def layout(self, width: int, height: int, max_tokens: int) -> ImageLayout:
        """Return the layout of an image. It is the same for all images, so `max_tokens` does not change it."""
        grid = Grid(self.height // self.patch_size, self.width // self.patch_size)
        return ImageLayout(((self.width, self.height),), (grid,), self.tokens)

    def tiles(self, image: Image.Image, layout: ImageLayout) -> list[Image.Image]:
        """Return the resized image as the only tile."""
        return [self.resized(image, *layout.sizes)]
