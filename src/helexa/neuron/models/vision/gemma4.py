"""The vision tower of Gemma 4 (reference: transformers `modeling_gemma4`).

A layer's forward pass, for patches x [P, H] of an image, with the residual stream x in float32:

    a = attention(rms_norm(x) * input_layernorm)          # scale 1; norms on query, key and value heads
    x = x + rms_norm(a) * post_attention_layernorm
    m = mlp(rms_norm(x) * pre_feedforward_layernorm)
    x = x + rms_norm(m) * post_feedforward_layernorm
"""

from typing import ClassVar

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron import tensors
from helexa.neuron.layers.vision_encoder import EncoderBlock, Frames, axial_tables, block_order
from helexa.neuron.layers.vision_tower_loader import Blocks, TowerLoader, padded_width
from helexa.neuron.models.settings import Settings
from helexa.neuron.models.vision.tower import ImageFeatures, VisionTower
from helexa.neuron.ops.linear_and_norm_operators import LinearOp, NormOp
from helexa.neuron.tensors import Tensor
from helexa.neuron.vision.image_tokens_and_errors import ImageLayout

_THETA = 100.0
_VECTOR = 16  # the kernels compute heads in vectors of 16 numbers
_PROJECTION = "embed_vision.embedding_projection"


class Gemma4Tower(VisionTower):
    """Gemma 4's tower: learned and rotary positions; averages of squares of patches."""

    supported: ClassVar = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "model_type": (None, "gemma4_vision"),
        "attention_bias": (None, False),
    }

    def patch_embedding(self) -> LinearOp:
        """Read and return the linear layer that computes the embeddings of patches."""
        return self.loader.patch_embedding("patch_embedder.input_proj", self.settings.hidden, self.patch_size)

    def block(self, index: int) -> EncoderBlock:
        """Read and return the encoder layer `index`."""
        loader, settings, prefix = self.loader, self.settings, f"encoder.layers.{index}"
        names = ("input", "pre_feedforward", "post_attention", "post_feedforward")
        norms = [loader.rms_norm(f"{prefix}.{name}_layernorm", settings.hidden, settings.eps) for name in names]
        attention = NormedAttention(loader, f"{prefix}.self_attn", settings)
        mlp = ClippedMlp(loader, f"{prefix}.mlp", settings)
        return EncoderBlock(attention, mlp, (norms[0], norms[1]), (norms[2], norms[3]))

    def prepare(self) -> None:
        """Read the position embeddings and the projection."""
        loader, settings, hidden = self.loader, self.settings, self.settings.hidden
        self._square = settings.positive("pooling_kernel_size")
        positions = settings.positive("position_embedding_size")
        self._table = loader.table("patch_embedder.position_embedding_table", 2, positions, hidden)
        self._theta = self.rope_theta(_THETA)
        self._standard = None
        if settings.config.get("standardize"):
            self._standard = loader.vector("std_bias", hidden), loader.vector("std_scale", hidden)
        self._norm = loader.ops.rms_norm(tensors.ones(hidden, device=loader.ops.device), settings.eps)
        self.width = loader.rows(f"{_PROJECTION}.weight")
        self._projection = loader.linear(_PROJECTION, self.width, hidden)
        text = self.config.get("text_config") or {}
        self.whole = text.get("use_bidirectional_attention") == "vision"

    def encode(self, pixels: Tensor, layout: ImageLayout) -> ImageFeatures:
        """Return the embeddings of an image, whose patches are in `block_order`."""
        (grid,) = layout.tiles
        ops, hidden_size = self.loader.ops, self.settings.hidden
        rows, columns = block_order(grid, self._square)
        positions = self._table[0][columns.to(ops.device)] + self._table[1][rows.to(ops.device)]
        tables = axial_tables(ops, columns, rows, self.settings.head_dim, self._theta)
        frames = Frames((grid.size,), tables)
        hidden, delta = self.embed(pixels) + positions, None
        for index in range(self.settings.layers):
            delta = self.run(index, hidden, delta, frames)
        hidden = hidden if delta is None else hidden + delta
        pooled = hidden.view(-1, self._square**2, hidden_size).mean(dim=1) * hidden_size**0.5
        if self._standard is not None:
            bias, scale = self._standard
            pooled = (pooled - bias) * scale
        return ImageFeatures(self._projection(self._norm(pooled)).float())


class ClippedLinear:
    """Gemma 4's linear layer of vision, with inputs and outputs clipped to ranges.

    Without the setting `use_clipped_linears`, nothing is clipped. For the arguments, see `TowerLoader.padded_linear`.
    """

    def __init__(
        self,
        loader: TowerLoader,
        name: str,
        settings: Settings,
        outputs: Blocks,
        inputs: int,
        padded_inputs: int,
        order: Tensor | None = None,
    ) -> None:
        linear = f"{name}.linear" if f"{name}.linear.weight" in loader else name  # `mmproj` files omit `.linear`
        self._product = loader.padded_linear([linear], outputs, inputs, padded_inputs, order)
        self._ranges = None
        if settings.config.get("use_clipped_linears"):
            self._ranges = _range(loader, f"{name}.input"), _range(loader, f"{name}.output")

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [patches, outputs] for inputs x [patches, inputs]."""
        if self._ranges is None:
            return self._product(x)
        inputs, outputs = self._ranges
        return self._product(x.clamp(*inputs)).clamp(*outputs)


def _range(loader: TowerLoader, name: str) -> tuple[float, float]:
    least, most = loader.scalar(f"{name}_min"), loader.scalar(f"{name}_max")
    if not least <= most:
        raise ModelFileError(f"tensor {name}_min is {least}, expected at most {name}_max, {most}")
    return least, most


class NormedAttention:
    """Gemma 4's attention of vision, with norms on heads of queries, keys, values.

    In the checkpoint, the numbers of a query or key head are in four quarters. The first and the second quarter rotate
    together, by the column of a patch. The third and the fourth rotate by its row. The kernels rotate the first half of
    a head with the second half, so the quarters are reordered: first, third, second, fourth.
    """

    def __init__(self, loader: TowerLoader, prefix: str, settings: Settings) -> None:
        self._ops, self._dim = loader.ops, settings.head_dim
        dim, padded, device = self._dim, -(-self._dim // _VECTOR) * _VECTOR, loader.ops.device
        if dim % 4:
            raise UnsupportedModelError(f"config: 'head_dim' of the vision tower is {dim}, expected a multiple of 4")
        hidden, blocks = settings.hidden, Blocks(settings.heads, dim, padded)
        order = tensors.arange(dim).view(2, 2, dim // 4).transpose(0, 1).flatten()
        self._shape = (settings.heads, padded)
        self._projections = [
            ClippedLinear(loader, f"{prefix}.{name}_proj", settings, blocks, hidden, hidden, rows)
            for name, rows in (("q", order), ("k", order), ("v", None))
        ]
        weights = [loader.vector(f"{prefix}.{name}_norm.weight", dim)[order.to(device)] for name in "qk"]
        weights.append(tensors.ones(dim, device=device))
        self._norms = [self._padded_norm(weight, padded, settings.eps) for weight in weights]
        self._out = ClippedLinear(
            loader, f"{prefix}.o_proj", settings, Blocks(1, hidden, hidden), settings.heads * dim, settings.heads * dim
        )

    def _padded_norm(self, weight: Tensor, padded: int, eps: float) -> NormOp:
        # The padding of a head is 0, but counts in the mean of the squares.
        share = self._dim / padded
        return self._ops.rms_norm(tensors.pad(weight * share**0.5, (0, padded - self._dim)), eps * share)

    def __call__(self, x: Tensor, frames: Frames) -> Tensor:
        """Return the attention output [patches, hidden] for inputs x [patches, hidden]."""
        heads, padded = self._shape
        qkv = [
            norm(projection(x).reshape(-1, padded)).view(-1, heads, padded)
            for projection, norm in zip(self._projections, self._norms, strict=True)
        ]
        out = self._ops.attend_frames(tensors.cat(qkv, dim=1), frames.rope, frames.lengths, 1.0)
        return self._out(out[:, :, : self._dim].reshape(x.shape[0], -1))


class ClippedMlp:
    """Gemma 4's feed-forward layer of vision, `down(gelu_tanh(gate(x)) * up(x))`."""

    def __init__(self, loader: TowerLoader, prefix: str, settings: Settings) -> None:
        self._ops = loader.ops
        hidden, width = settings.hidden, settings.intermediate
        padded = padded_width(width)
        self._gate, self._up = (
            ClippedLinear(loader, f"{prefix}.{name}_proj", settings, Blocks(1, width, padded), hidden, hidden)
            for name in ("gate", "up")
        )
        self._down = ClippedLinear(loader, f"{prefix}.down_proj", settings, Blocks(1, hidden, hidden), width, padded)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [patches, hidden] for inputs x [patches, hidden]."""
        return self._down(self._ops.activate(self._gate(x), "gelu_tanh") * self._up(x))
