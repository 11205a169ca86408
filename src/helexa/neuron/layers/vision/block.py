"""An encoder layer of a vision tower: attention and a feed-forward layer."""

from torch import Tensor

from helexa.neuron.layers.vision.frame_attention import FrameAttention, Frames
from helexa.neuron.layers.vision.mlp import Mlp
from helexa.neuron.ops.norm import NormOp


class EncoderBlock:
    """A pre-norm encoder layer, which adds the outputs of attention and of a feed-forward layer to the residual stream.

    Args:
        norms: norm of the input of attention, and norm of the input of the feed-forward layer.
    """

    def __init__(self, attention: FrameAttention, mlp: Mlp, norms: tuple[NormOp, NormOp]) -> None:
        self._attention = attention
        self._mlp = mlp
        self._attention_norm, self._mlp_norm = norms

    def __call__(self, hidden: Tensor, delta: Tensor | None, frames: Frames) -> Tensor:
        """Compute the layer, and return the output of the feed-forward layer, [P, H].

        The output is not yet added to the residual stream. The caller passes the output to the next layer.

        Args:
            hidden: float32 [P, H], residual stream of P patches, changed in place.
            delta: [P, H], output of the previous layer, which this layer adds to `hidden`; None for the first layer.
        """
        delta = self._attention(self._attention_norm(hidden, delta), frames)
        return self._mlp(self._mlp_norm(hidden, delta))
