"""Merger of adjacent patches into one embedding of the text model."""

from torch import Tensor

from helexa.neuron.layers.vision.tower_loader import TowerLoader
from helexa.neuron.ops.norm import NormOp


class PatchMerger:
    """Concatenates the hidden states of the patches of a block, and projects them to the width of the text model.

    The projection is `second(gelu(first(x)))`.

    Args:
        norm: norm of the hidden states.
        first: name of the first projection.
        second: name of the second projection.
        patches: number of patches of a block. The patches of a block are adjacent rows.
        norm_after: whether the norm is applied to the concatenated hidden states of a block, and not to the hidden
            state of each patch.

    Attributes:
        width: width of the embeddings.
    """

    def __init__(
        self,
        loader: TowerLoader,
        norm: NormOp,
        first: str,
        second: str,
        *,
        hidden: int,
        patches: int,
        norm_after: bool = False,
    ) -> None:
        self._ops = loader.ops
        self._norm, self._norm_after = norm, norm_after
        self._inputs = hidden * patches
        self.width = loader.rows(f"{second}.weight")
        self._first = loader.linear(first, self._inputs, self._inputs)
        self._second = loader.linear(second, self.width, self._inputs)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the embeddings, float32 [P / patches, width], of hidden states [P, H]."""
        blocks = hidden.view(-1, self._inputs) if self._norm_after else hidden
        normed = self._norm(blocks).view(-1, self._inputs)
        return self._second(self._ops.activate(self._first(normed), "gelu")).float()
