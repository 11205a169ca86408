"""Compute a Mamba-2 layer between its input projection and its norm.

The layer applies a short convolution over tokens to inputs, keys and queries. The scan (see `scan`) then updates and
reads the recurrent state of each sequence. Finally, the layer adds a part of the inputs, and multiplies by a gate.

The scan is in plain torch and float32. Source: Dao and Gu, 2024, arXiv 2405.21060. Each head has a state matrix
S [N, P]. For each token with input x [P], keys B [N], query C [N] and step size dt, the scan multiplies the state by a
decay exp(g), with g = -rate * dt, adds the outer product of B and dt x, and reads the state:

    S <- exp(g) S + B (dt x);    out = C S

Two algorithms compute the same result: `recurrent` for few tokens and `chunked` for many tokens. Both have these
arguments, for M sequences of T tokens each, H heads and G groups. H / G consecutive heads share the keys and the query
of a group:

    x:      [M, T, H, P], inputs times dt; float32
    b, c:   [M, T, G, N], keys and queries; float32
    g:      [M, T, H], logarithm of the decay, at most 0; float32
    state:  [M, H, N, P], float32, contiguous; replaced in place by the state after the last token

Both return float32 [M, T, H, P]. Reference: transformers `modeling_mamba2`.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

from helexa.neuron import tensors
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.convolution import ConvWeights, convolve
from helexa.neuron.ops.gated_delta import by_chunk, decay_between, wide
from helexa.neuron.ops.state_cache import MatrixCache, advance_spans
from helexa.neuron.tensors import Device, Tensor

_FEW_TOKENS = 16  # token count up to which `recurrent` is faster than `chunked`


@dataclass(frozen=True)
class ScanSizes:
    """Sizes of a Mamba-2 layer."""

    heads: int  # H, number of heads
    groups: int  # G, number of groups. H / G consecutive heads share keys and query.
    head_dim: int  # P, width of the input of a head
    state_dim: int  # N, width of keys and query
    kernel: int  # K, number of tokens that the convolution covers

    @property
    def values(self) -> int:
        """Width of the inputs of all heads of a token together, H * P."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """G * N, the width of the keys of all groups together, and of all queries."""
        return self.groups * self.state_dim

    @property
    def mixed(self) -> int:
        """C, the width of the inputs, keys and queries of a token together."""
        return self.values + 2 * self.keys

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one sequence's part of `MatrixCache.conv` and `MatrixCache.state`."""
        return (self.kernel - 1, self.mixed), (self.heads, self.state_dim, self.head_dim)

    @property
    def state_bytes(self) -> int:
        """Number of bytes of the recurrent state of one sequence, in float32."""
        return 4 * sum(map(prod, self.state_shapes))


@dataclass(frozen=True)
class ScanWeights:
    """Float32 weights of a Mamba-2 layer without its projections and its norm."""

    convolution: ConvWeights  # weights of the convolution over C columns
    rate: Tensor  # [H], decay rate of each head
    bias: Tensor  # [H], bias of the step size of each head
    skip: Tensor  # [H], factor by which each head's input is multiplied and added to its result


class ScanOp(Protocol):
    """Operator that computes a Mamba-2 layer without its projections and its norm."""

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        ...

    def __call__(
        self, z: Tensor, mixed: Tensor, steps: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows (tokens) of a step, and update `cache`.

        The states change as `advance_spans` describes. `ScanSizes` defines the sizes C, H and P.

        Args:
            z: [T, H * P], inputs of the output gate.
            mixed: [T, C], inputs, keys and queries before the convolution.
            steps: [T, H], inputs of the step sizes, which are `softplus(steps + bias)`. z, mixed and steps must be
                column ranges of one tensor.
            rows: indexes of the S rows whose outputs are returned; None for all rows.

        Returns:
            [S, H * P], or [T, H * P] if `rows` is None, in the activation dtype.
        """
        ...


class StateSpace:
    """Operator of a Mamba-2 layer in plain torch; implements `ScanOp`."""

    def __init__(self, sizes: ScanSizes, weights: ScanWeights, device: Device) -> None:
        self._sizes = sizes
        self._weights = weights
        self._device = device  # device of the recurrent states
        self._widths = [sizes.values, sizes.keys, sizes.keys]

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        return MatrixCache(*(tensors.empty(slots, *shape, device=self._device) for shape in self._sizes.state_shapes))

    def __call__(
        self, z: Tensor, mixed: Tensor, steps: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of a step, and update `cache` (see `ScanOp`)."""
        dt = tensors.nn.functional.softplus(wide(steps, self._device) + self._weights.bias)
        inputs = [mixed, dt.float(), (dt * -self._weights.rate).float()]
        out = tensors.empty(len(mixed), self._sizes.heads, self._sizes.head_dim, device=mixed.device)
        advance_spans(self._advance, inputs, cache, batch, out, self._device.type != "cpu")
        if rows is not None:
            out, z = out[rows], z[rows]
        return (out.view(z.shape) * tensors.nn.functional.silu(z.float())).to(mixed.dtype)

    def _advance(self, inputs: list[Tensor], state: MatrixCache) -> Tensor:
        """Return each head's result before the gate, float32 [M, T, heads, width].

        Args:
            inputs: three tensors [M, T, width] for T tokens of each of M sequences. The first has inputs, keys and
                queries before the convolution, the second the step sizes, the third the logarithm of the decay.
            state: states of the M sequences, changed in place.
        """
        sizes, weights = self._sizes, self._weights
        mixed, dt, g = inputs
        convolved = convolve(mixed, weights.convolution.kernel, state.conv, weights.convolution.bias)
        x, b, c = tensors.nn.functional.silu(convolved, inplace=True).split(self._widths, dim=-1)
        x = x.unflatten(-1, (sizes.heads, sizes.head_dim))
        b, c = (part.unflatten(-1, (sizes.groups, sizes.state_dim)) for part in (b, c))
        return scan(x * dt[..., None], b, c, g, state.state) + x * weights.skip[:, None]


def scan(x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Apply the state-space scan with the algorithm that is faster for x's T tokens."""
    algorithm = recurrent if x.shape[1] <= _FEW_TOKENS else chunked
    return algorithm(x, b, c, g, state)


def recurrent(x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Apply the scan token by token (for the arguments, see the module)."""
    x, b, c, decay = _by_head(x, b, c, wide(g, g.device).exp().float())
    flat = state.view(-1, *state.shape[2:])
    out = tensors.empty_like(x)
    for token in range(x.shape[1]):
        now = slice(token, token + 1)
        flat.mul_(decay[:, now]).baddbmm_(b[:, now].transpose(1, 2), x[:, now])
        out[:, now] = tensors.bmm(c[:, now], flat)
    return out.view(state.shape[0], -1, *out.shape[1:]).transpose(1, 2)


def chunked(x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Apply the state-space scan in chunks of 64 tokens (arguments: see the module).

    The result of token i of a chunk is a sum over the tokens j of the chunk and the state S before the chunk:

        out_i = exp(g_1 + .. + g_i) C_i S + sum_{j<=i} exp(g_{j+1} + .. + g_i) (C_i B_j) x_j

    The temporary memory grows with the number of tokens, so callers split long sequences into several calls.
    """
    length = x.shape[1]
    x, b, c, g = (by_chunk(part) for part in _by_head(x, b, c, g))  # [chunks, M * H, CHUNK, width]
    since_start = g.cumsum(2).exp_()
    between = decay_between(g)  # [chunks, M * H, CHUNK, CHUNK]
    within = tensors.matmul(tensors.matmul(c, b.transpose(2, 3)).mul_(between), x)
    decayed = (b * between[:, :, -1, :, None]).transpose(2, 3)
    c, survives = c * since_start, since_start[:, :, -1:]

    flat = state.view(-1, *state.shape[2:])
    for chunk in range(x.shape[0]):
        within[chunk].baddbmm_(c[chunk], flat)
        flat.mul_(survives[chunk]).baddbmm_(decayed[chunk], x[chunk])
    out = within.transpose(0, 1).reshape(state.shape[0], state.shape[1], -1, state.shape[3])  # [M, H, padded T, P]
    return out[:, :, :length].transpose(1, 2)


def _by_head(x: Tensor, b: Tensor, c: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Return the four inputs, [sequences * heads, tokens, width], one row per head."""
    repeats = x.shape[2] // b.shape[2]
    b, c = (part.repeat_interleave(repeats, dim=2) for part in (b, c))
    return tuple(part.transpose(1, 2).flatten(0, 1) for part in (x, b, c, g[..., None]))
