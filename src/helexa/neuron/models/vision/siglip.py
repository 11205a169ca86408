"""The vision transformer SigLIP, which several towers share (reference: transformers `modeling_siglip`)."""

from typing import ClassVar

from torch import Tensor

from helexa.neuron.layers.vision.block import EncoderBlock
from helexa.neuron.layers.vision.frame_attention import FrameAttention, Frames
from helexa.neuron.layers.vision.mlp import PlainMlp
from helexa.neuron.models.vision.tower import VisionTower
from helexa.neuron.ops.linear import LinearOp

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


class SiglipTower(VisionTower):
    """A vision transformer with a learned position embedding for each patch of a square image."""

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
        """Return the normalized hidden states, [P, H], of P patches.

        Args:
            positions: position embedding of each patch, [P, H].
            lengths: number of patches of each tile.
        """
        hidden = self.embed(pixels) + positions
        delta = None
        for index in range(self.settings.layers):
            delta = self.run(index, hidden, delta, Frames(lengths))
        return self._post_norm(hidden, delta)
