"""Pixtral, the tower of Pixtral 12B, Mistral Small 3.1 and Ministral 3.

References: transformers `modeling_pixtral`, `modeling_mistral3`, `modeling_llava`.
"""

from typing import ClassVar

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.layers.vision_encoder import (
    EncoderBlock,
    FrameAttention,
    Frames,
    GatedMlp,
    axial_tables,
    block_order,
)
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.tensors import Tensor
from helexa.neuron.vision.image_tokens_and_errors import ImageLayout

_EPS = 1e-5
_THETA = 10_000.0
_PROJECTOR = "multi_modal_projector"


class PixtralTower(VisionTower):
    """Pixtral's vision transformer: rotary positions, merger of adjacent patches.

    Pixtral 12B (`llava`) has no merger: each patch becomes a token.
    """

    supported: ClassVar = {"hidden_act": ("gelu", "silu"), "num_channels": (3,), "model_type": (None, "pixtral")}

    def patch_embedding(self) -> LinearOp:
        """Read and return the linear layer that computes the embeddings of patches."""
        return self.loader.patch_embedding("patch_conv", self.settings.hidden, self.patch_size)

    def block(self, index: int) -> EncoderBlock:
        """Read and return the encoder layer `index`."""
        loader, hidden, prefix = self.loader, self.settings.hidden, f"transformer.layers.{index}"
        qkv = [f"{prefix}.attention.{name}_proj" for name in "qkv"]
        attention = FrameAttention(loader, qkv, f"{prefix}.attention.o_proj", hidden=hidden, heads=self.settings.heads)
        mlp = GatedMlp(
            loader,
            f"{prefix}.feed_forward",
            hidden=hidden,
            intermediate=self.settings.intermediate,
            activation=self.settings.config["hidden_act"],
        )
        first, second = (loader.rms_norm(f"{prefix}.{name}_norm", hidden, _EPS) for name in ("attention", "ffn"))
        return EncoderBlock(attention, mlp, (first, second))

    def prepare(self) -> None:
        """Read the norm of the patches and the projector, and check their settings."""
        loader, hidden = self.loader, self.settings.hidden
        self._merges = self.config["model_type"] == "mistral3"
        # The default values of LLaVA select another layer and drop the first patch, which is not implemented.
        # Therefore, configurations of LLaVA must state `vision_feature_layer` and `vision_feature_select_strategy`.
        default = (None,) if self._merges else ()
        supported = {
            "vision_feature_layer": (*default, -1),
            "vision_feature_select_strategy": (*default, "full"),
            "projector_hidden_act": (None, "gelu"),
        }
        for key, values in supported.items():
            if self.config.get(key) not in values:
                raise UnsupportedModelError(f"config: '{key}' is {self.config.get(key)!r}, supported: {values[-1]!r}")
        self._square = self.config.get("spatial_merge_size", 2) if self._merges else 1
        if type(self._square) is not int or not 0 < self._square < 16:
            raise ModelFileError(f"config: 'spatial_merge_size' is {self._square!r}, expected a number from 1 to 15")
        self._theta = self.rope_theta(_THETA)
        self._embedding_norm = loader.rms_norm("ln_pre", hidden, _EPS)
        text = self.config.get("text_config") or {}
        if self._merges:
            self._norm = loader.rms_norm(f"{_PROJECTOR}.norm", hidden, text.get("rms_norm_eps", _EPS))
            self._merger = loader.linear(f"{_PROJECTOR}.patch_merger.merging_layer", hidden, hidden * self._square**2)
        self.width = loader.rows(f"{_PROJECTOR}.linear_1.weight")
        self._first = loader.linear(f"{_PROJECTOR}.linear_1", self.width, hidden)
        self._second = loader.linear(f"{_PROJECTOR}.linear_2", self.width, self.width)

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image, whose patches are in `block_order`."""
        (grid,) = layout.tiles
        ops, hidden_size = self.loader.ops, self.settings.hidden
        rows, columns = block_order(grid, self._square)
        tables = axial_tables(ops, rows, columns, hidden_size // self.settings.heads, self._theta, alternate=True)
        frames = Frames((grid.size,), tables)
        hidden, delta = self._embedding_norm(self.embed(pixels)).float(), None
        for index in range(self.settings.layers):
            delta = self.run(index, hidden, delta, frames)
        if self._merges:
            normed = self._norm(hidden, delta)
            # The merger's columns are ordered by channel, and for each channel by the patches of a block.
            blocks = normed.view(-1, self._square**2, hidden_size).transpose(1, 2)
            inputs = self._merger(blocks.reshape(-1, hidden_size * self._square**2))
        else:
            inputs = (hidden if delta is None else hidden + delta).to(ops.activation_dtype)
        return ImageFeatures(self._second(ops.activate(self._first(inputs), "gelu")).float())
