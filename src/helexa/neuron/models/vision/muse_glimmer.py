"""The vision tower of Muse Glimmer.

Reference: transformers `modeling_muse_glimmer`.
"""

from typing import ClassVar

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron import tensors
from helexa.neuron.layers.vision_encoder import (
    EncoderBlock,
    FrameAttention,
    Frames,
    PlainMlp,
    axial_tables,
    block_order,
    interpolated_with_zeros,
    window_order,
)
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.tensors import Tensor
from helexa.neuron.vision.image_tokens_and_errors import ImageLayout

_EPS = 1e-5
_THETA = 10_000.0
_STEPS = 2
_FULL, _WINDOW = "full_attention", "window_attention"


class MuseGlimmerTower(VisionTower):
    """Muse Glimmer's vision transformer: most layers attend in square windows.

    The positions are learned and rotary. The hidden states of a block of patches are concatenated for the projector.
    """

    supported: ClassVar = {"hidden_act": ("gelu",), "patch_temporal": (_STEPS,)}

    def patch_embedding(self) -> LinearOp:
        """Read and return the linear layer that computes the embeddings of patches."""
        name = "patch_embedder.patch_embedding"
        return self.loader.patch_embedding(name, self.settings.hidden, self.patch_size, _STEPS, flat=True)

    def block(self, index: int) -> EncoderBlock:
        """Read and return the encoder layer `index`."""
        loader, hidden, prefix = self.loader, self.settings.hidden, f"layers.{index}"
        qkv = [f"{prefix}.attn.{name}_proj" for name in "qkv"]
        attention = FrameAttention(loader, qkv, f"{prefix}.attn.proj", hidden=hidden, heads=self.settings.heads)
        intermediate = self.settings.intermediate
        up, down = f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
        mlp = PlainMlp(loader, up, down, hidden=hidden, intermediate=intermediate, activation="gelu")
        first, second = (loader.layer_norm(f"{prefix}.norm{number}", hidden, _EPS) for number in (1, 2))
        return EncoderBlock(attention, mlp, (first, second))

    def prepare(self) -> None:
        """Read the position embeddings, the norms and the projector."""
        settings, loader, hidden = self.settings, self.loader, self.settings.hidden
        if self.config.get("projector_hidden_act", "gelu") != "gelu":
            raise UnsupportedModelError(
                f"config: 'projector_hidden_act' is {self.config['projector_hidden_act']!r}, supported: 'gelu'"
            )
        self._square, self._side = settings.positive("merge_size"), settings.positive("pos_emb_height")
        if settings.positive("pos_emb_width") != self._side:
            raise UnsupportedModelError(
                f"config: 'pos_emb_width' is {settings.config['pos_emb_width']}, expected {self._side} (pos_emb_height)"
            )
        last = settings.layers - 1
        default = [_FULL if (index + 1) % 4 == 0 or index == last else _WINDOW for index in range(settings.layers)]
        self._types = settings.config.get("layer_types") or default
        if len(self._types) != settings.layers or not {*self._types} <= {_FULL, _WINDOW}:
            raise ModelFileError(
                f"config: 'layer_types' of the vision tower is {str(self._types)[:80]}, expected '{_FULL}' or "
                f"'{_WINDOW}' for each of {settings.layers} layers"
            )
        self._theta, eps = self.rope_theta(_THETA), settings.fraction("layer_norm_eps", _EPS)
        self._table = loader.table("patch_embedder.position_embedding_table.weight", self._side**2, hidden)
        self._first_norm, self._last_norm = (loader.layer_norm(name, hidden, eps) for name in ("ln_pre", "ln_post"))
        inner = loader.rows("vision_adapter.fc1.weight")
        self.width = loader.rows("vision_projection.weight")
        self._adapter = [
            loader.linear("vision_adapter.fc1", inner, hidden * self._square**2),
            loader.linear("vision_adapter.fc2", inner, inner),
        ]
        self._projection = loader.linear("vision_projection", self.width, inner)
        text_eps = (self.config.get("text_config") or {}).get("rms_norm_eps", _EPS)
        self._projected_norm = loader.ops.rms_norm(tensors.ones(self.width, device=loader.ops.device), text_eps)

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image, whose patches are in `block_order`."""
        (grid,) = layout.tiles
        ops, hidden_size = self.loader.ops, self.settings.hidden
        rows, columns = block_order(grid, self._square)
        places = rows * grid.columns + columns  # the index of each patch in row-major order
        # As in the reference, the position of a patch is looked up with rows and columns of the grid exchanged.
        across = grid._replace(rows=grid.columns, columns=grid.rows)
        positions = interpolated_with_zeros(self._table, self._side, across, places // grid.rows, places % grid.rows)
        embedded = self._first_norm(self.embed(pixels) + positions).float()
        # The patches of a window become adjacent, because attention computes adjacent rows.
        order, sizes = window_order(grid, self._side)
        by_window = places.argsort()[order]
        hidden = embedded[by_window.to(ops.device)]
        # The columns rotate the first half of a head. Both axes count from 1.
        axes = columns[by_window] + 1, rows[by_window] + 1
        tables = axial_tables(ops, *axes, hidden_size // self.settings.heads, self._theta)
        frames = {_FULL: Frames((grid.size,), tables), _WINDOW: Frames(tuple(sizes), tables)}
        delta = None
        for index, kind in enumerate(self._types):
            delta = self.run(index, hidden, delta, frames[kind])
        normed = self._last_norm(hidden, delta)[by_window.argsort().to(ops.device)]
        # The projector's columns are ordered by channel, and for each channel by the patches of a block.
        blocks = normed.view(-1, self._square**2, hidden_size).transpose(1, 2)
        projected = blocks.reshape(-1, hidden_size * self._square**2)
        for layer in self._adapter:
            projected = ops.activate(layer(projected), "gelu")
        return ImageFeatures(self._projected_norm(self._projection(projected)).float())
