"""The vision tower of Qwen3.5 (reference: transformers `modeling_qwen3_5`)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.vision.block import EncoderBlock
from helexa.neuron.layers.vision.frame_attention import FrameAttention, Frames
from helexa.neuron.layers.vision.merger import PatchMerger
from helexa.neuron.layers.vision.mlp import PlainMlp
from helexa.neuron.layers.vision.positions import axial_tables, block_order, interpolated
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower
from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.vision.preprocessing.layout import ImageLayout

EPS = 1e-6
THETA = 10_000.0
STEPS = 2


class Qwen35Tower(VisionTower):
    """A vision transformer with learned and rotary positions, which merges blocks of adjacent patches to tokens."""

    supported: ClassVar = {"hidden_act": ("gelu_pytorch_tanh",), "in_channels": (3,), "temporal_patch_size": (STEPS,)}

    def normalized(self, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings `vision_config` with the keys that `Settings` checks."""
        return {
            **vision,
            "num_hidden_layers": vision.get("depth"),
            "num_attention_heads": vision.get("num_heads"),
        }

    def patch_embedding(self) -> LinearOp:
        """Read and return the linear layer that computes the embeddings of patches."""
        return self.loader.patch_embedding("patch_embed.proj", self.settings.hidden, self.patch_size, STEPS)

    def block(self, index: int) -> EncoderBlock:
        """Read and return the encoder layer `index`."""
        loader, hidden, prefix = self.loader, self.settings.hidden, f"blocks.{index}"
        attention = FrameAttention(
            loader, [f"{prefix}.attn.qkv"], f"{prefix}.attn.proj", hidden=hidden, heads=self.settings.heads
        )
        mlp = PlainMlp(
            loader,
            f"{prefix}.mlp.linear_fc1",
            f"{prefix}.mlp.linear_fc2",
            hidden=hidden,
            intermediate=self.settings.intermediate,
            activation="gelu_tanh",
        )
        first, second = (loader.layer_norm(f"{prefix}.norm{number}", hidden, EPS) for number in (1, 2))
        return EncoderBlock(attention, mlp, (first, second))

    def prepare(self) -> None:
        """Read the position embeddings and the merger."""
        self.merge = self.settings.positive("spatial_merge_size")
        positions = self.settings.positive("num_position_embeddings")
        self._side = int(positions**0.5)
        if self._side**2 != positions:
            raise ModelFileError(f"config: 'num_position_embeddings' is {positions}, expected a square number")
        self._table = self.loader.table("pos_embed.weight", positions, self.settings.hidden)
        self._merger = self.merger("merger", norm_after=False)
        self.width = self._merger.width

    def merger(self, prefix: str, norm_after: bool) -> PatchMerger:
        """Read and return a merger. The names of its tensors start with `prefix`."""
        hidden, patches = self.settings.hidden, self.merge**2
        return PatchMerger(
            self.loader,
            self.loader.layer_norm(f"{prefix}.norm", hidden * patches if norm_after else hidden, EPS),
            f"{prefix}.linear_fc1",
            f"{prefix}.linear_fc2",
            hidden=hidden,
            patches=patches,
            norm_after=norm_after,
        )

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image, whose patches are in the order of blocks."""
        (grid,) = layout.tiles
        rows, columns = block_order(grid, self.merge)
        hidden = self.embed(pixels) + interpolated(self._table, self._side, grid, rows, columns)
        dim = self.settings.head_dim
        frames = Frames((grid.size,), axial_tables(self.loader.ops, rows, columns, dim, THETA))
        delta, deepstack = None, []
        for index in range(self.settings.layers):
            delta = self.run(index, hidden, delta, frames)
            if index in self.deepstack_layers:
                hidden, delta = hidden + delta, None
                deepstack.append(self.deepstack(index, hidden))
        return ImageFeatures(self._merger(hidden if delta is None else hidden + delta), tuple(deepstack))

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Indexes of the layers whose hidden states the text model receives, too. Qwen3.5 has none."""
        return ()

    def deepstack(self, index: int, hidden: Tensor) -> Tensor:
        """Return the projection, [T, width], of the hidden states after layer `index`."""
        raise NotImplementedError
