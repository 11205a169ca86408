"""The base class of vision towers: patch embeddings, layers, projection."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron import tensors
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.vision_encoder import EncoderBlock, Frames
from helexa.neuron.layers.vision_tower_loader import CHANNELS, TowerLoader, padded_width
from helexa.neuron.models.settings import Settings
from helexa.neuron.processes import heartbeat
from helexa.neuron.tensors import Tensor
from helexa.neuron.vision.image_tokens_and_errors import ImageLayout

_VECTOR = 16  # the kernels compute hidden states in vectors of 16 numbers


class ImageFeatures(NamedTuple):
    """The output of a vision tower for an image."""

    # float32 [T, H], the embeddings of the T tokens of the image. H is the hidden size of the text model.
    embeddings: Tensor
    # Tensors with the shape of `embeddings`. The first tensor is added to the hidden states of the image's tokens after
    # the first decoder layer, the second tensor after the second decoder layer, and so on.
    deepstack: tuple[Tensor, ...] = ()

    def clone(self) -> "ImageFeatures":
        """Return a copy. Later steps may overwrite the output of a tower."""
        return ImageFeatures(self.embeddings.clone(), tuple(layer.clone() for layer in self.deepstack))


class VisionTower:
    """An encoder of images. Subclasses define the layers and the positions of patches.

    Args:
        config: configuration of the checkpoint (see `VisionConfig.config`).
    """

    # Implemented values of settings of `vision_config` that change the computation.
    supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    whole: bool = False  # whether an image token attends to all tokens of its image in the text model

    width: int  # H, the width of the embeddings. It must be the hidden size of the text model.
    # Only set if the text model has positions with three axes (M-RoPE): `merge` x `merge` patches become one token. 0
    # for other text models.
    merge: int = 0

    def __init__(self, config: Mapping[str, Any], loader: Loader) -> None:
        self.config = config
        self.settings = Settings(self.normalized(config["vision_config"]))  # the checked settings of `vision_config`
        self.settings.require(**self.supported)
        if self.settings.hidden % _VECTOR or self.settings.hidden % self.settings.heads:
            raise UnsupportedModelError(
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
        """Indexes of the layers whose hidden states are also inputs of the text model."""
        return ()

    @property
    def patch_values(self) -> int:
        """Number of values of a patch in the input."""
        return CHANNELS * self.patch_size**2

    def normalized(self, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return `vision_config` under the key names that `Settings` expects."""
        return dict(vision)

    def patch_embedding(self) -> Any:
        """Read and return the linear layer that computes the embeddings of patches."""
        raise NotImplementedError

    def block(self, index: int) -> EncoderBlock:
        """Read and return the encoder layer `index`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Read the position embeddings and the projection, and set `width`."""
        raise NotImplementedError

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return an image's embeddings; `pixels`: float32 [patches, values of a patch]."""
        raise NotImplementedError

    def rope_theta(self, default: float) -> float:
        """Return the base of the rotary frequencies of both axes.

        Raises:
            ModelFileError: the settings are invalid, or not supported (subclass UnsupportedModelError).
        """
        config = self.settings.config
        rope = config.get("rope_parameters") or {}
        if not isinstance(rope, dict) or rope.get("rope_type", "axial") not in ("axial", "default"):
            raise UnsupportedModelError(
                f"config: 'rope_parameters' of the vision tower is {rope!r}, supported: type 'axial'"
            )
        theta = rope.get("rope_theta", config.get("rope_theta") or default)
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 1:
            raise ModelFileError(f"config: 'rope_theta' of the vision tower is {theta!r}, expected a number above 1")
        return float(theta)

    def embed(self, pixels: Tensor) -> Tensor:
        """Return patch embeddings without positions, float32 [patches, hidden]."""
        padding = padded_width(self.patch_values) - self.patch_values
        padded = tensors.pad(pixels.to(self.loader.ops.device), (0, padding))
        return self._embed(padded.to(self.loader.ops.activation_dtype)).float()

    def run(self, index: int, hidden: Tensor, delta: Tensor | None, frames: Frames) -> Tensor:
        """Return layer `index`'s output; update `hidden` in place (see `EncoderBlock`)."""
        delta = self.blocks[index](hidden, delta, frames)
        heartbeat.beat()
        return delta
