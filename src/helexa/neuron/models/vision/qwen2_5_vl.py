"""The vision tower of Qwen2.5-VL (reference: transformers `modeling_qwen2_5_vl`)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.vision.block import EncoderBlock
from helexa.neuron.layers.vision.frame_attention import FrameAttention, Frames
from helexa.neuron.layers.vision.merger import PatchMerger
from helexa.neuron.layers.vision.mlp import GatedMlp
from helexa.neuron.layers.vision.positions import axial_tables, block_order
from helexa.neuron.models.vision.qwen3_5 import EPS, STEPS, THETA
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower
from helexa.neuron.ops.linear import LinearOp
from helexa.neuron.vision.preprocessing.layout import Grid, ImageLayout


class Qwen25VlTower(VisionTower):
    """A vision transformer with RMS norms and gated MLPs, whose layers mostly attend within square windows."""

    supported: ClassVar = {"hidden_act": ("silu",), "in_channels": (3,), "temporal_patch_size": (STEPS,)}

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
            raise ModelFileError("config: 'window_size' or 'fullatt_block_indexes' is invalid")
        self._full_layers = frozenset(full)
        norm = loader.rms_norm("merger.ln_q", hidden, EPS)
        self._merger = PatchMerger(loader, norm, "merger.mlp.0", "merger.mlp.2", hidden=hidden, patches=self.merge**2)
        self.width = self._merger.width

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image, whose patches are in the order of blocks.

        The layers compute the patches in the order of windows.
        """
        (grid,) = layout.tiles
        ops, patches = self.loader.ops, self.merge**2
        blocks = Grid(grid.rows // self.merge, grid.columns // self.merge)
        order, sizes = window_order(blocks, self._window)
        by_window = (order[:, None] * patches + torch.arange(patches)).flatten()
        rows, columns = (places[by_window] for places in block_order(grid, self.merge))
        tables = axial_tables(ops, rows, columns, self.settings.head_dim, THETA)
        hidden = self.embed(pixels)[by_window.to(ops.device)]
        windows = Frames(tuple(size * patches for size in sizes), tables)
        whole = Frames((grid.size,), tables)
        delta = None
        for index in range(self.settings.layers):
            delta = self.run(index, hidden, delta, whole if index in self._full_layers else windows)
        merged = self._merger(hidden if delta is None else hidden + delta)
        return ImageFeatures(merged[order.argsort().to(ops.device)])


def window_order(grid: Grid, size: int) -> tuple[Tensor, list[int]]:
    """Return the order of the cells of a grid by windows, int64 [cells], and the number of cells of each window.

    The windows of `size` x `size` cells are in the order of rows, and so are the cells of a window.
    """
    numbers = torch.arange(grid.size).view(grid)
    windows = [
        numbers[top : top + size, left : left + size].flatten()
        for top in range(0, grid.rows, size)
        for left in range(0, grid.columns, size)
    ]
    return torch.cat(windows), [len(window) for window in windows]
