"""Vision towers of Qwen3-VL, Qwen3.5 and Qwen2.5-VL.

References: transformers `modeling_qwen3_vl`, `modeling_qwen3_5`, `modeling_qwen2_5_vl`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.layers.vision_encoder import (
    EncoderBlock,
    FrameAttention,
    Frames,
    GatedMlp,
    PatchMerger,
    PlainMlp,
    axial_tables,
    block_order,
    interpolated,
    window_order,
)
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.tensors import Tensor
from helexa.neuron.vision.image_tokens_and_errors import Grid, ImageLayout

EPS = 1e-6
THETA = 10_000.0
STEPS = 2


class QwenTower(VisionTower):
    """Qwen's vision transformer, whose patches cover two time steps."""

    def normalized(self, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return `vision_config`, also with the names of `Settings` for depth and heads."""
        return {
            **vision,
            "num_hidden_layers": vision.get("depth"),
            "num_attention_heads": vision.get("num_heads"),
        }

    def patch_embedding(self) -> LinearOp:
        """Read and return the linear layer that computes the embeddings of patches."""
        return self.loader.patch_embedding("patch_embed.proj", self.settings.hidden, self.patch_size, STEPS)


class Qwen35Tower(QwenTower):
    """Qwen3.5's vision transformer: learned and rotary positions, a merger."""

    supported: ClassVar = {"hidden_act": ("gelu_pytorch_tanh",), "in_channels": (3,), "temporal_patch_size": (STEPS,)}

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
        """Read and return a `PatchMerger`, whose tensor names start with `prefix`."""
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
        """Return the embeddings of an image, whose patches are in `block_order`."""
        (grid,) = layout.tiles
        rows, columns = block_order(grid, self.merge)
        hidden = self.embed(pixels) + interpolated(self._table, self._side, grid, rows, columns)
        dim = self.settings.head_dim
        frames = Frames((grid.size,), axial_tables(self.loader.ops, rows, columns, dim, THETA))
        delta, deepstack = None, []
        for index in range(self.settings.layers):
            delta = self.run(index, hidden, delta, frames)
            if index in self.deepstack_layers:
                # The projection reads the complete residual stream, so the layer's output is added now.
                hidden, delta = hidden + delta, None
                deepstack.append(self.deepstack(index, hidden))
        return ImageFeatures(self._merger(hidden if delta is None else hidden + delta), tuple(deepstack))

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Indexes of layers whose hidden states are also inputs of the text model: none."""
        return ()

    def deepstack(self, index: int, hidden: Tensor) -> Tensor:
        """Return the projection, [rows, width], of the hidden states after layer `index`."""
        raise NotImplementedError


class Qwen3VlTower(Qwen35Tower):
    """Qwen3.5's tower with DeepStack: text layers also receive hidden states."""

    def prepare(self) -> None:
        """Call `Qwen35Tower.prepare`, then read the mergers of the DeepStack layers."""
        super().prepare()
        layers = self.settings.config.get("deepstack_visual_indexes") or []
        if not isinstance(layers, list) or not set(layers) <= set(range(self.settings.layers)):
            raise ModelFileError(
                f"config: 'deepstack_visual_indexes' is {str(layers)[:80]}, expected layer indexes from 0 to "
                f"{self.settings.layers - 1}"
            )
        self._deepstack = {
            index: self.merger(f"deepstack_merger_list.{place}", norm_after=True) for place, index in enumerate(layers)
        }

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Indexes of the layers whose hidden states are also inputs of the text model."""
        return tuple(self._deepstack)

    def deepstack(self, index: int, hidden: Tensor) -> Tensor:
        """Return the projection, [rows, width], of the hidden states after layer `index`."""
        return self._deepstack[index](hidden)


class Qwen25VlTower(QwenTower):
    """Qwen2.5-VL's vision transformer: most layers attend in square windows."""

    supported: ClassVar = {"hidden_act": ("silu",), "in_channels": (3,), "temporal_patch_size": (STEPS,)}

    def block(self, index: int) -> EncoderBlock:
        """Read and return the encoder layer `index`."""
        loader, hidden, prefix = self.loader, self.settings.hidden, f"blocks.{index}"
        joined = f"{prefix}.attn.qkv.weight" in loader  # `mmproj` files have three matrices
        qkv = [f"{prefix}.attn.qkv"] if joined else [f"{prefix}.attn.{name}" for name in "qkv"]
        attention = FrameAttention(loader, qkv, f"{prefix}.attn.proj", hidden=hidden, heads=self.settings.heads)
        mlp = GatedMlp(loader, f"{prefix}.mlp", hidden=hidden, intermediate=self.settings.intermediate)
        first, second = (loader.rms_norm(f"{prefix}.norm{number}", hidden, EPS) for number in (1, 2))
        return EncoderBlock(attention, mlp, (first, second))

    def prepare(self) -> None:
        """Read the merger, and check the settings of the windows."""
        settings, loader, hidden = self.settings, self.loader, self.settings.hidden
        self.merge = settings.positive("spatial_merge_size")
        self._window = settings.positive("window_size") // self.merge // self.patch_size
        full = settings.config.get("fullatt_block_indexes")
        if self._window < 1 or not isinstance(full, list):
            raise ModelFileError(
                f"config: 'window_size' is {settings.config['window_size']}, expected at least "
                f"{self.merge * self.patch_size}, and 'fullatt_block_indexes' is {str(full)[:40]}, expected a list"
            )
        self._full_layers = frozenset(full)
        norm = loader.rms_norm("merger.ln_q", hidden, EPS)
        self._merger = PatchMerger(loader, norm, "merger.mlp.0", "merger.mlp.2", hidden=hidden, patches=self.merge**2)
        self.width = self._merger.width

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image, whose patches are in `block_order`."""
        (grid,) = layout.tiles
        ops, patches = self.loader.ops, self.merge**2
        blocks = Grid(grid.rows // self.merge, grid.columns // self.merge)
        # The patches of a window become adjacent, because attention computes adjacent rows.
        order, sizes = window_order(blocks, self._window)
        by_window = (order[:, None] * patches + tensors.arange(patches)).flatten()
        rows, columns = (places[by_window] for places in block_order(grid, self.merge))
        tables = axial_tables(ops, rows, columns, self.settings.head_dim, THETA)
        hidden = self.embed(pixels)[by_window.to(ops.device)]
        windows = Frames(tuple(size * patches for size in sizes), tables)
        whole = Frames((grid.size,), tables)
        delta = None
        for index in range(self.settings.layers):
            delta = self.run(index, hidden, delta, whole if index in self._full_layers else windows)
        merged = self._merger(hidden if delta is None else hidden + delta)
        # The embeddings return from the order of windows to the order of the prompt's tokens.
        return ImageFeatures(merged[order.argsort().to(ops.device)])
