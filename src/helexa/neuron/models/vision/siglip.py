"""SigLIP, and the towers of Gemma 3 and Idefics3 (SmolVLM) that contain it.

References: transformers `modeling_siglip`, `modeling_gemma3`, `modeling_idefics3`.
"""

from typing import ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.layers.vision_encoder import EncoderBlock, FrameAttention, Frames, PlainMlp
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.tensors import Tensor
from helexa.neuron.vision.image_tokens_and_errors import ImageLayout

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

_GEMMA3_PROJECTION = "multi_modal_projector.mm_input_projection_weight"
_NORM = "multi_modal_projector.mm_soft_emb_norm"
_OFFSET = 1.0  # the weight of the norm is stored minus 1

_IDEFICS3_PROJECTION = "connector.modality_projection.proj"


class SiglipTower(VisionTower):
    """SigLIP's vision transformer, with a learned position for each patch."""

    supported: ClassVar = {"hidden_act": tuple(_ACTIVATIONS), "num_channels": (3,)}

    def patch_embedding(self) -> LinearOp:
        """Read and return the linear layer that computes the embeddings of patches."""
        return self.loader.patch_embedding("embeddings.patch_embedding", self.settings.hidden, self.patch_size)

    def block(self, index: int) -> EncoderBlock:
        """Read and return the encoder layer `index`."""
        loader, hidden, prefix = self.loader, self.settings.hidden, f"encoder.layers.{index}"
        qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        attention = FrameAttention(
            loader, qkv, f"{prefix}.self_attn.out_proj", hidden=hidden, heads=self.settings.heads
        )
        mlp = PlainMlp(
            loader,
            f"{prefix}.mlp.fc1",
            f"{prefix}.mlp.fc2",
            hidden=hidden,
            intermediate=self.settings.intermediate,
            activation=_ACTIVATIONS[self.settings.config["hidden_act"]],
        )
        first, second = (loader.layer_norm(f"{prefix}.layer_norm{number}", hidden, self.eps) for number in (1, 2))
        return EncoderBlock(attention, mlp, (first, second))

    @property
    def eps(self) -> float:
        """Epsilon of the layer norms."""
        return self.settings.fraction("layer_norm_eps", 1e-6)

    def prepare(self) -> None:
        """Read the position embeddings and the final norm."""
        hidden = self.settings.hidden
        self.side = self.settings.positive("image_size") // self.patch_size
        self.table = self.loader.table("embeddings.position_embedding.weight", self.side**2, hidden)
        self._post_norm = self.loader.layer_norm("post_layernorm", hidden, self.eps)

    def encode_patches(self, pixels: Tensor, positions: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Return the normalized hidden states, [P, hidden], of P patches.

        Args:
            positions: position embedding of each patch, [P, hidden].
            lengths: number of patches of each tile.
        """
        hidden = self.embed(pixels) + positions
        delta = None
        for index in range(self.settings.layers):
            delta = self.run(index, hidden, delta, Frames(lengths))
        return self._post_norm(hidden, delta)


class Gemma3Tower(SiglipTower):
    """SigLIP, then an average of each square of patches, a norm and a projection."""

    whole = True

    def prepare(self) -> None:
        """Call `SiglipTower.prepare`, then read the projector."""
        super().prepare()
        hidden, tokens = self.settings.hidden, self.config.get("mm_tokens_per_image", 256)
        self._tokens_per_side = int(tokens**0.5)
        if self._tokens_per_side < 1 or self.side % self._tokens_per_side or self._tokens_per_side**2 != tokens:
            raise ModelFileError(
                f"config: 'mm_tokens_per_image' is {tokens}, but {self.side} x {self.side} patches cannot be divided "
                "into this number of equal squares"
            )
        self._norm = self.loader.rms_norm(_NORM, hidden, self.eps, _OFFSET)
        self._projection = self.loader.transposed_linear(_GEMMA3_PROJECTION, hidden)
        self.width = self.loader.width(_GEMMA3_PROJECTION)

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image, whose patches are in row-major order."""
        hidden = self.encode_patches(pixels, self.table, (self.side**2,)).float()
        side, square = self._tokens_per_side, self.side // self._tokens_per_side
        pooled = hidden.view(side, square, side, square, -1).mean(dim=(1, 3)).view(side**2, -1)
        return ImageFeatures(self._projection(self._norm(pooled)).float())


class Idefics3Tower(SiglipTower):
    """SigLIP for several tiles, and a projection of concatenated squares of patches."""

    def prepare(self) -> None:
        """Call `SiglipTower.prepare`, then read the projection."""
        super().prepare()
        self._square = self.config.get("scale_factor", 2)
        if type(self._square) is not int or not 0 < self._square <= self.side:
            raise ModelFileError(f"config: 'scale_factor' is {self._square!r}, expected 1 to {self.side}")
        self.width = self.loader.rows(f"{_IDEFICS3_PROJECTION}.weight")
        self._projection = self.loader.linear(_IDEFICS3_PROJECTION, self.width, self.settings.hidden * self._square**2)

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image: the embeddings of each tile in turn.

        All tiles have the same size. The patches of a tile are in row-major order.
        """
        tile, square, count = layout.tiles[0], self._square, len(layout.tiles)
        rows, columns = (_buckets(size, self.side) for size in tile)
        places = (rows[:, None] * self.side + columns).flatten().to(self.table.device)
        positions = self.table[places].repeat(count, 1)
        hidden = self.encode_patches(pixels, positions, tuple(grid.size for grid in layout.tiles))
        squares = hidden.view(count, tile.rows // square, square, tile.columns // square, square, -1)
        joined = squares.transpose(2, 3).reshape(-1, square**2 * self.settings.hidden)
        return ImageFeatures(self._projection(joined).float())


def _buckets(size: int, side: int) -> Tensor:
    """Return the position index, below `side`, of each of `size` rows or columns."""
    # Computed in float32 as in transformers, because another rounding could map a place to another row.
    boundaries = tensors.arange(1 / side, 1.0, 1 / side)
    places = tensors.arange(size, dtype=tensors.float32) * (1.0 / size)
    return tensors.bucketize(places.clamp(max=1.0 - 1e-6), boundaries, right=True)
