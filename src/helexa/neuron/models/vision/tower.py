"""The base class of all vision towers: patch embeddings, encoder layers, and a projection to the text model."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.vision.block import EncoderBlock
from helexa.neuron.layers.vision.frame_attention import Frames
from helexa.neuron.layers.vision.tower_loader import CHANNELS, TowerLoader, padded_width
from helexa.neuron.models.settings import Settings
from helexa.neuron.processes import heartbeat
from helexa.neuron.vision.preprocessing.layout import ImageLayout

_VECTOR = 16  # the kernels compute hidden states in vectors of 16 numbers


class ImageFeatures(NamedTuple):
    """The output of a vision tower for an image.

    Attributes:
        embeddings: float32 [T, H], the embeddings of the T tokens of the image. H is the hidden size of the text model.
        deepstack: tensors of the same shape. The first tensor is added to the hidden states of the image's tokens after
            the first decoder layer, the second tensor after the second decoder layer, and so on.
    """

    embeddings: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def clone(self) -> "ImageFeatures":
        """Return a copy. Later steps may overwrite the output of a tower."""
        return ImageFeatures(self.embeddings.clone(), tuple(layer.clone() for layer in self.deepstack))


class VisionTower:
    """An encoder of images. Subclasses define the layers and the positions of patches.

    Args:
        config: configuration of the checkpoint (see `VisionConfig.config`).
        loader: loader of the checkpoint with the vision part.

    Attributes:
        settings: the checked settings of `vision_config`.
        width: H, the width of the embeddings. It must be the hidden size of the text model.
        merge: number of rows of patches, and of columns of patches, that become one token, if the text model has
            positions with three axes (M-RoPE); 0 for other text models.
    """

    supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Implemented values of settings of `vision_config` that change the computation."""

    whole: ClassVar[bool] = False
    """Whether an image token attends to all tokens of its image in the text model."""

    width: int
    merge: int = 0

    def __init__(self, config: Mapping[str, Any], loader: Loader) -> None:
        self.config = config
        self.settings = Settings(self.normalized(config["vision_config"]))
        self.settings.require(**self.supported)
        if self.settings.hidden % _VECTOR or self.settings.hidden % self.settings.heads:
            raise ModelFileError(
                f"config: a vision tower with a 'hidden_size' of {self.settings.hidden} and {self.settings.heads} "
                f"heads is not supported; 'hidden_size' must be a multiple of {_VECTOR} and of the number of heads"
            )
        self.loader = TowerLoader(loader)
        self.patch_size = self.settings.positive("patch_size")
        self._embed = self.patch_embedding()
        self.blocks = [self.block(index) for index in range(self.settings.layers)]
        self.prepare()

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Indexes of the layers whose hidden states the text model receives, too."""
        return ()

    @property
    def patch_values(self) -> int:
        """Number of values of a patch in the input."""
        return CHANNELS * self.patch_size**2

    def normalized(self, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings `vision_config` with the keys that `Settings` checks."""
        return dict(vision)

    def patch_embedding(self) -> Any:
        """Read and return the linear layer that computes the embeddings of patches."""
        raise NotImplementedError

    def block(self, index: int) -> EncoderBlock:
        """Read and return the encoder layer `index`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Read the position embeddings and the projection to the text model, and set `width`."""
        raise NotImplementedError

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image.

        Args:
            pixels: float32 [P, values], the normalized patches of the image (see `PreparedImage.pixels`).
            layout: tiles and patches of the image.
        """
        raise NotImplementedError

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of P patches, float32 [P, H], without position embeddings."""
        padding = padded_width(self.patch_values) - self.patch_values
        padded = F.pad(pixels.to(self.loader.ops.device), (0, padding))
        return self._embed(padded.to(self.loader.ops.activation_dtype)).float()

    def run(self, index: int, hidden: Tensor, delta: Tensor | None, frames: Frames) -> Tensor:
        """Compute the encoder layer `index`, and return its output (see `EncoderBlock`)."""
        delta = self.blocks[index](hidden, delta, frames)
        heartbeat.beat()
        return delta
