"""Settings of pixels that all image processors share, and the conversion of resized tiles to normalized patches."""

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from PIL import Image

CHANNELS = 3

Size = Annotated[int, Meta(ge=1, le=1 << 15)]
"""A number of pixels or patches along one side of an image."""

Mean = Annotated[float, Meta(ge=-1, le=1)]
Factor = Annotated[float, Meta(gt=0, le=10)]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class Pixels(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the conversion of pixels to patches.

    Attributes:
        patch_size: number of pixels along one side of a patch.
        merge: number of patches along one side of a block. The patches of a block are adjacent rows of the result.
        resample: Pillow's number of the filter for resizing: 1 is Lanczos, 2 is bilinear, 3 is bicubic.
        mean: number that is subtracted from the values of each channel, after they were multiplied by `factor`.
        std: number by which the difference is divided.
        factor: factor on the stored values from 0 to 255.
    """

    patch_size: Size
    merge: Size = 1
    resample: Annotated[int, Meta(ge=1, le=3)] = Image.Resampling.BICUBIC
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
        """Write the normalized values of patches [patches, channel, row, column] to `out`, [patches, values]."""
        table = self._table()
        channels = out.reshape(patches.shape)
        for channel in range(CHANNELS):
            channels[:, channel] = table[channel][patches[:, channel]]

    def _table(self) -> NDArray[np.float32]:
        """Return the normalized value of each stored value, [channel, 256].

        The steps and dtypes are those of transformers, so the results are equal bit for bit.
        """
        scaled = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        return (scaled - mean) / std
