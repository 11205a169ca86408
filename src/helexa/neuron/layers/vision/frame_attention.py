"""Self-attention without a mask, in which each patch attends to all patches of its frame."""

from typing import NamedTuple

from torch import Tensor

from helexa.neuron.layers.vision.tower_loader import Blocks, TowerLoader

_VECTOR = 16  # the kernels compute heads in vectors of 16 numbers


class Frames(NamedTuple):
    """The division of the patches of an image into frames, and their rotary tables.

    Attributes:
        lengths: number of patches of each frame.
        rope: cos and sin tables of the rotary embedding, each float32 [P, D / 2] for P patches and heads of D numbers;
            None for no rotation.
    """

    lengths: tuple[int, ...]
    rope: tuple[Tensor, Tensor] | None = None


class FrameAttention:
    """Multi-head attention of P patches of the hidden size H. Heads are padded to a multiple of 16 numbers.

    Args:
        qkv: names of the projections of queries, keys and values. A single name is a projection whose outputs are the
            queries, then the keys, then the values.
        out: name of the output projection.
        hidden: hidden size H.
        heads: number of heads.
    """

    def __init__(self, loader: TowerLoader, qkv: list[str], out: str, *, hidden: int, heads: int) -> None:
        self._ops = loader.ops
        self._heads, self._dim = heads, hidden // heads
        self._padded = -(-self._dim // _VECTOR) * _VECTOR
        blocks = Blocks(3 * heads // len(qkv), self._dim, self._padded)
        self._qkv = loader.padded_linear(qkv, blocks, hidden, hidden)
        self._out = loader.linear(out, hidden, hidden)

    def __call__(self, x: Tensor, frames: Frames) -> Tensor:
        """Return the attention output [P, H] for inputs x [P, H]."""
        qkv = self._qkv(x).view(x.shape[0], 3 * self._heads, self._padded)
        out = self._ops.attend_frames(qkv, frames.rope, frames.lengths, self._dim**-0.5)
        return self._out(out[:, :, : self._dim].reshape(x.shape[0], -1))
