"""The vision tower of Idefics3 and SmolVLM (reference: transformers `modeling_idefics3`)."""

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.models.vision.siglip import SiglipTower
from helexa.neuron.models.vision.tower import ImageFeatures
from helexa.neuron.vision.preprocessing.layout import ImageLayout

_PROJECTION = "connector.modality_projection.proj"


class Idefics3Tower(SiglipTower):
    """SigLIP for several tiles, followed by a projection of the concatenated hidden states of squares of patches."""

    def prepare(self) -> None:
        """Read the projection, after the work of `SiglipTower.prepare`."""
        super().prepare()
        self._square = self.config.get("scale_factor", 2)
        if type(self._square) is not int or not 0 < self._square <= self.side:
            raise ModelFileError(f"config: 'scale_factor' is {self._square!r}, expected a small positive number")
        self.width = self.loader.rows(f"{_PROJECTION}.weight")
        self._projection = self.loader.linear(_PROJECTION, self.width, self.settings.hidden * self._square**2)

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image: those of all tiles, one tile after another."""
        tile, square, count = layout.tiles[0], self._square, len(layout.tiles)
        rows, columns = (_buckets(size, self.side) for size in tile)
        places = (rows[:, None] * self.side + columns).flatten().to(self.table.device)
        positions = self.table[places].repeat(count, 1)
        hidden = self.encode_patches(pixels, positions, tuple(grid.size for grid in layout.tiles))
        squares = hidden.view(count, tile.rows // square, square, tile.columns // square, square, -1)
        joined = squares.transpose(2, 3).reshape(-1, square**2 * self.settings.hidden)
        return ImageFeatures(self._projection(joined).float())


def _buckets(size: int, side: int) -> Tensor:
    """Return the row (or column) of the position table for each of `size` rows of a tile, int64 [size].

    The steps are those of transformers, which divides the range from 0 to 1 into `side` buckets.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(size, dtype=torch.float32) * (1.0 / torch.tensor(size))
    return torch.bucketize(places.clamp(max=1.0 - 1e-6), boundaries, right=True)
