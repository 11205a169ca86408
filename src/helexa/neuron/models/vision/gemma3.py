"""The vision tower of Gemma 3 (reference: transformers `modeling_gemma3`)."""

from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.models.vision.siglip import SiglipTower
from helexa.neuron.models.vision.tower import ImageFeatures
from helexa.neuron.vision.preprocessing.layout import ImageLayout

_PROJECTION = "multi_modal_projector.mm_input_projection_weight"
_NORM = "multi_modal_projector.mm_soft_emb_norm"
_OFFSET = 1.0  # the weight of the norm is stored minus 1


class Gemma3Tower(SiglipTower):
    """SigLIP, followed by the average of squares of patches, an RMS norm and a projection."""

    whole = True

    def prepare(self) -> None:
        """Read the projector, after the work of `SiglipTower.prepare`."""
        super().prepare()
        hidden, tokens = self.settings.hidden, self.config.get("mm_tokens_per_image", 256)
        self._tokens_per_side = int(tokens**0.5)
        if self._tokens_per_side < 1 or self.side % self._tokens_per_side or self._tokens_per_side**2 != tokens:
            raise ModelFileError(
                f"config: {tokens} tokens per image do not divide {self.side} x {self.side} patches into squares"
            )
        self._norm = self.loader.rms_norm(_NORM, hidden, self.eps, _OFFSET)
        self._projection = self.loader.transposed_linear(_PROJECTION, hidden)
        self.width = self.loader.width(_PROJECTION)

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image, whose patches are in the order of rows."""
        hidden = self.encode_patches(pixels, self.table, (self.side**2,)).float()
        side, square = self._tokens_per_side, self.side // self._tokens_per_side
        pooled = hidden.view(side, square, side, square, -1).mean(dim=(1, 3)).view(side**2, -1)
        return ImageFeatures(self._projection(self._norm(pooled)).float())
