"""Layers of vision towers, and the positions of patches."""

from collections.abc import Callable
from typing import NamedTuple

from helexa.neuron import tensors
from helexa.neuron.layers.vision_tower_loader import Blocks, TowerLoader, padded_width
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import NormOp
from helexa.neuron.tensors import Tensor
from helexa.neuron.vision.image_tokens_and_errors import Grid

# Patches that a feed-forward layer computes at a time, because the intermediate values of a large image would take much
# memory.
_ROWS = 4096

_GATES = ("silu", "gelu_tanh")  # activations of `Ops.gate_mul`

_VECTOR = 16  # the kernels compute heads in vectors of 16 numbers


def block_order(grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each patch, int64 [patches], block by block.

    A block has `merge` x `merge` patches, and the grid has whole blocks only. The blocks are in row-major order, and so
    are the patches of each block.
    """
    shape = (grid.rows // merge, merge, grid.columns // merge, merge)
    rows = tensors.arange(grid.rows)[:, None].expand(grid)
    columns = tensors.arange(grid.columns).expand(grid)
    by_block = (places.reshape(shape).transpose(1, 2).flatten() for places in (rows, columns))
    row_ids, column_ids = by_block
    return row_ids, column_ids


def axial_tables(
    ops: Ops, rows: Tensor, columns: Tensor, dim: int, theta: float, alternate: bool = False
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [patches, dim / 2] each, of a rotation in two axes.

    The first dim / 4 angles of a patch depend on its row in the image, the others on its column. `rows` and `columns`
    are [patches], `theta` is the base of the frequencies, and `dim` the size of a head.

    Args:
        alternate: whether each of the `dim` / 2 frequencies of a head is used by one axis: the first by rows, the
            second by columns, and so on. If False, both axes have the same frequencies.
    """
    half = dim // 2
    exponents = tensors.arange(0, half, 2, dtype=tensors.float64) / half
    axes = [
        ops.rope_tables(ids.int().to(ops.device), (theta ** -(exponents + shift)).float().to(ops.device))
        for ids, shift in ((rows, 0.0), (columns, 2 / dim if alternate else 0.0))
    ]
    cos, sin = (tensors.cat(tables, dim=1) for tables in zip(*axes, strict=True))
    return cos, sin


def interpolated(table: Tensor, side: int, grid: Grid, rows: Tensor, columns: Tensor) -> Tensor:
    """Interpolate a square table to position embeddings, float32 [patches, hidden].

    The table is [side * side, hidden]. `rows` and `columns` are the row and the column of each patch in `grid`.
    """
    # As in `get_vision_interpolation_indices_and_weights` of transformers, the corners of the grid have the embeddings
    # of the corners of the table.
    return _bilinear(table, side, _neighbors(rows, grid.rows, side), _neighbors(columns, grid.columns, side))


def interpolated_with_zeros(table: Tensor, side: int, grid: Grid, rows: Tensor, columns: Tensor) -> Tensor:
    """Return position embeddings like `interpolated`, with zeros around the table.

    The table and the grid of patches cover the same square. The value of a cell belongs to the center of the cell, as
    in torch's `align_corners=False`.
    """
    axes = []
    for index, size in ((rows, grid.rows), (columns, grid.columns)):
        place = (index.float() + 0.5) * side / size - 0.5
        before = place.floor()
        share, near = place - before, before.long()
        axes.append(
            (
                (near.clamp(min=0), (near + 1).clamp(max=side - 1)),
                ((1 - share) * (near >= 0), share * (near + 1 < side)),
            )
        )
    return _bilinear(table, side, *axes)


# For one axis: the indexes of two table entries per patch, and the shares (weights) of both entries.
_Taps = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def _bilinear(table: Tensor, side: int, row_taps: _Taps, column_taps: _Taps) -> Tensor:
    (row_places, row_shares), (column_places, column_shares) = row_taps, column_taps
    total = tensors.zeros(len(row_places[0]), table.shape[1], device=table.device)
    for row in range(2):
        for column in range(2):
            places = row_places[row] * side + column_places[column]
            shares = row_shares[row] * column_shares[column]
            total += table[places.to(table.device)] * shares[:, None].to(table.device)
    return total


def window_order(grid: Grid, size: int) -> tuple[Tensor, list[int]]:
    """Return the cell numbers window by window, int64 [cells], and cells per window.

    A window has at most `size` x `size` cells. The number of a cell is its index in row-major order. Both results have
    the windows in row-major order.
    """
    numbers = tensors.arange(grid.size).view(grid)
    windows = [
        numbers[top : top + size, left : left + size].flatten()
        for top in range(0, grid.rows, size)
        for left in range(0, grid.columns, size)
    ]
    return tensors.cat(windows), [len(window) for window in windows]


def _neighbors(index: Tensor, size: int, side: int) -> _Taps:
    """Return each patch's two nearest of `side` table entries, with their shares."""
    place = index.float() * (side - 1) / max(size - 1, 1)
    before = place.floor()
    share = place - before
    return (before.long(), (before.long() + 1).clamp(max=side - 1)), (1 - share, share)


# A feed-forward layer: computes the output [P, H] for x [P, H] (P patches, H the hidden size).
Mlp = Callable[[Tensor], Tensor]


class PlainMlp:
    """A vision encoder's feed-forward layer `down(activation(up(x)))`."""

    def __init__(
        self, loader: TowerLoader, up: str, down: str, *, hidden: int, intermediate: int, activation: str
    ) -> None:
        self._ops, self._activation = loader.ops, activation
        padded = padded_width(intermediate)
        self._up = loader.padded_linear([up], Blocks(1, intermediate, padded), hidden, hidden)
        self._down = loader.padded_linear([down], Blocks(1, hidden, hidden), intermediate, padded)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [P, H] for x [P, H] (P patches, H the hidden size)."""
        parts = [self._down(self._ops.activate(self._up(part), self._activation)) for part in x.split(_ROWS)]
        return parts[0] if len(parts) == 1 else tensors.cat(parts)


class GatedMlp:
    """A vision encoder's feed-forward layer `down(activation(gate(x)) * up(x))`."""

    def __init__(
        self, loader: TowerLoader, prefix: str, *, hidden: int, intermediate: int, activation: str = "silu"
    ) -> None:
        self._ops, self._activation = loader.ops, activation
        outputs = Blocks(1, intermediate, padded := padded_width(intermediate))
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate = None
        if activation not in _GATES:
            self._gate = loader.padded_linear(names[:1], outputs, hidden, hidden)
            names = names[1:]
        self._gate_up = loader.padded_linear(names, outputs, hidden, hidden)
        self._down = loader.padded_linear([f"{prefix}.down_proj"], Blocks(1, hidden, hidden), intermediate, padded)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [P, H] for x [P, H] (P patches, H the hidden size)."""
        parts = [self._down(self._gated(part)) for part in x.split(_ROWS)]
        return parts[0] if len(parts) == 1 else tensors.cat(parts)

    def _gated(self, x: Tensor) -> Tensor:
        if self._gate is None:
            return self._ops.gate_mul(self._gate_up(x), self._activation)
        return self._ops.activate(self._gate(x), self._activation) * self._gate_up(x)


class Frames(NamedTuple):
    """The frames into which patches are divided, and the rotary tables of the patches.

    A patch attends only to the patches of its own frame.
    """

    lengths: tuple[int, ...]  # number of patches of each frame
    # cos and sin tables of the rotary embedding, each float32 [P, D / 2] for P patches and heads of D numbers; None for
    # no rotation
    rope: tuple[Tensor, Tensor] | None = None


class FrameAttention:
    """A vision encoder's multi-head attention of P patches of hidden size H.

    `qkv` names three projections, or one projection whose outputs are the queries, then the keys, then the values.
    """

    def __init__(self, loader: TowerLoader, qkv: list[str], out: str, *, hidden: int, heads: int) -> None:
        self._ops = loader.ops
        self._heads, self._dim = heads, hidden // heads
        # The kernels compute whole vectors. The padding is 0 and does not change the scores.
        self._padded = -(-self._dim // _VECTOR) * _VECTOR
        blocks = Blocks(3 * heads // len(qkv), self._dim, self._padded)
        self._qkv = loader.padded_linear(qkv, blocks, hidden, hidden)
        self._out = loader.linear(out, hidden, hidden)

    def __call__(self, x: Tensor, frames: Frames) -> Tensor:
        """Return the attention output [patches, hidden] for inputs x [patches, hidden]."""
        qkv = self._qkv(x).view(x.shape[0], 3 * self._heads, self._padded)
        out = self._ops.attend_frames(qkv, frames.rope, frames.lengths, self._dim**-0.5)
        return self._out(out[:, :, : self._dim].reshape(x.shape[0], -1))


class EncoderBlock:
    """A vision encoder's pre-norm layer: attention and feed-forward layer.

    Args:
        post_norms: norms of the outputs of attention and feed-forward layer; None if they are not normalized.
    """

    def __init__(
        self,
        attention: Callable[[Tensor, Frames], Tensor],
        mlp: Mlp,
        norms: tuple[NormOp, NormOp],
        post_norms: tuple[NormOp, NormOp] | None = None,
    ) -> None:
        self._attention = attention
        self._mlp = mlp
        self._attention_norm, self._mlp_norm = norms
        self._after_attention, self._after_mlp = post_norms or (None, None)

    def __call__(self, hidden: Tensor, delta: Tensor | None, frames: Frames) -> Tensor:
        """Return the feed-forward layer's output for P patches, [P, hidden].

        `hidden`, float32 [P, hidden], is the residual stream. This layer adds the previous layer's output `delta` (None
        in the first layer) and its own attention output to `hidden` in place. The next layer adds the returned output.
        """
        delta = self._attention(self._attention_norm(hidden, delta), frames)
        delta = delta if self._after_attention is None else self._after_attention(delta)
        output = self._mlp(self._mlp_norm(hidden, delta))
        return output if self._after_mlp is None else self._after_mlp(output)


class PatchMerger:
    """Projects blocks of adjacent patches to the text model: `second(gelu(first(x)))`.

    A block has `patches` adjacent rows. With `norm_after`, the norm is applied to the concatenated hidden states of a
    block, not to the hidden state of each patch.
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
        self.width = loader.rows(f"{second}.weight")  # width of the embeddings
        self._first = loader.linear(first, self._inputs, self._inputs)
        self._second = loader.linear(second, self.width, self._inputs)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return embeddings, float32 [blocks, width], of hidden states [patches, hidden]."""
        blocks = hidden.view(-1, self._inputs) if self._norm_after else hidden
        normed = self._norm(blocks).view(-1, self._inputs)
        return self._second(self._ops.activate(self._first(normed), "gelu")).float()
