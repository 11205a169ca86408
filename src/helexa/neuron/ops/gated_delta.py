"""Compute a Gated DeltaNet layer between its input and output projections.

The layer applies a short convolution over tokens to queries, keys and values. The gated delta rule (`gated_delta`)
then updates and reads the recurrent state of each sequence. Finally, the layer normalizes and gates the result of each
head.

Source of the gated delta rule: Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464.

Each head has a state matrix S [Dk, Dv], which maps keys to values. For each token with query q, key k and value v, the
rule first multiplies the state by a decay exp(g). It then moves the value stored for k toward v, by a share beta of the
difference. The output is the value stored for q:

    S <- exp(g) S;    S <- S + k (beta (v - k S));    out = q S

Two algorithms compute the same result: `recurrent` for few tokens and `chunked` for many tokens. Both have these
arguments, for B sequences of T tokens each. There are Hk key heads of width Dk and Hv value heads of width Dv:

    q, k:   [B, T, Hk, Dk]; the functions scale each head to length 1, and then divide q by sqrt(Dk). Hv / Hk
        consecutive value heads share each key head
    v:      [B, T, Hv, Dv]
    g:      [B, T, Hv], logarithm of the decay, at most 0; float32
    beta:   [B, T, Hv], between 0 and 1; float32
    state:  [B, Hv, Dk, Dv], float32, contiguous; replaced in place by the state after the last token

Both return float32 [B, T, Hv, Dv]. Reference: transformers `modeling_qwen3_next`.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

from helexa.neuron import tensors
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.convolution import convolve
from helexa.neuron.ops.linear_and_norm_operators import NormOp
from helexa.neuron.ops.state_cache import MatrixCache, advance_spans
from helexa.neuron.tensors import Device, Tensor

CHUNK = 64  # Number of tokens per chunk in `chunked`
_FEW_TOKENS = 16  # token count up to which `recurrent` is faster than `chunked`
_EPSILON = 1e-6


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a Gated DeltaNet layer."""

    key_heads: int  # Hk, number of key heads, which equals the number of query heads
    heads: int  # Hv, number of value heads. Hv / Hk value heads share one key head.
    key_dim: int  # Dk, width of a query or key head
    value_dim: int  # Dv, width of a value head
    kernel: int  # K, number of tokens that the convolution covers

    @property
    def keys(self) -> int:
        """Hk * Dk, the width of all key heads together, and of all query heads together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of the value vectors of all heads of a token together, Hv * Dv."""
        return self.heads * self.value_dim

    @property
    def mixed(self) -> int:
        """C, the width of the queries, keys and values of a token in all heads together."""
        return 2 * self.keys + self.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one sequence's part of `MatrixCache.conv` and `MatrixCache.state`."""
        return (self.kernel - 1, self.mixed), (self.heads, self.key_dim, self.value_dim)

    @property
    def state_bytes(self) -> int:
        """Number of bytes of the recurrent state of one sequence, in float32."""
        return 4 * sum(map(prod, self.state_shapes))


@dataclass(frozen=True)
class DeltaWeights:
    """Float32 weights of a Gated DeltaNet layer with `DeltaSizes`."""

    kernel: Tensor  # [K, C], weights of the convolution over K tokens; the last row applies to the current token
    rate: Tensor  # [Hv], decay rate of each value head (see `log_decay`)
    bias: Tensor  # [Hv], bias of the decay of each value head (see `log_decay`)
    norm: Tensor  # [Dv], weight of the RMS norm on the result of each head
    eps: float  # epsilon of the RMS norm


class DeltaOp(Protocol):
    """Operator that computes a Gated DeltaNet layer without its projections."""

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        ...

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows (tokens) of a step, and update `cache`.

        The states change as `advance_spans` describes. `DeltaSizes` defines the sizes C, Hv and Dv.

        Args:
            mixed: [T, C], queries, keys and values before the convolution.
            z: [T, Hv * Dv], inputs of the output gate.
            b: [T, Hv], inputs of beta, the share of the state's old content that a token replaces.
            a: [T, Hv], inputs of the decay of the state. mixed, z, b and a must be column ranges of one tensor.
            rows: indexes of the S rows whose outputs are returned; None for all rows.

        Returns:
            [S, Hv * Dv], or [T, Hv * Dv] if `rows` is None, in the activation dtype.
        """
        ...


class DeltaRule:
    """Operator of a Gated DeltaNet layer in plain torch; implements `DeltaOp`."""

    def __init__(self, sizes: DeltaSizes, weights: DeltaWeights, norm: NormOp, device: Device) -> None:
        self._weights = weights
        self._norm = norm  # operator of the RMS norm with the weight `weights.norm`
        self._device = device  # device of the recurrent states
        self._state_shapes = sizes.state_shapes
        keys = (sizes.key_heads, sizes.key_dim)
        self._head_shapes = (keys, keys, (sizes.heads, sizes.value_dim))
        self._widths = [sizes.keys, sizes.keys, sizes.values]
        self._together = device.type != "cpu"

    def new_cache(self, slots: int) -> MatrixCache:
        """Return a cache for `slots` recurrent states, with uninitialized memory."""
        return MatrixCache(*(tensors.empty(slots, *shape, device=self._device) for shape in self._state_shapes))

    def __call__(
        self, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, cache: MatrixCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        """Apply the layer to the T rows of a step, and update `cache` (see `DeltaOp`)."""
        inputs = (mixed, log_decay(a, self._weights.rate, self._weights.bias), wide(b, self._device).sigmoid().float())
        out = tensors.empty(len(mixed), *self._head_shapes[-1], device=mixed.device)
        advance_spans(self._advance, inputs, cache, batch, out, self._together)
        if rows is not None:
            out, z = out[rows], z[rows]
        normed = self._norm(out.flatten(0, 1)).view(z.shape)
        return (normed * tensors.nn.functional.silu(z.float())).to(mixed.dtype)

    def _advance(self, inputs: list[Tensor], state: MatrixCache) -> Tensor:
        """Return the result of each value head before the norm, float32 [B, T, Hv, Dv].

        Args:
            inputs: three tensors [B, T, width] for T tokens of each of B sequences: queries, keys and values before the
                convolution, the logarithm of the decay, and beta.
            state: states of the B sequences, changed in place.
        """
        mixed, g, beta = inputs
        convolved = tensors.nn.functional.silu(convolve(mixed, self._weights.kernel, state.conv), inplace=True)
        parts = zip(convolved.split(self._widths, dim=-1), self._head_shapes, strict=True)
        q, k, v = (x.unflatten(-1, shape) for x, shape in parts)
        return gated_delta(q, k, v, g, beta, state.state)


def wide(x: Tensor, device: Device) -> Tensor:
    """Return `x` as float64, or as float32 on MPS, which has no float64."""
    # Callers convert numbers before functions such as the exponential. On a CPU, vector and scalar instructions compute
    # the exponential of a float32 number differently. The number of elements, and therefore the number of heads on this
    # rank, decides which instructions compute an element. With float64, the results do not depend on this number.
    return x.float() if device.type == "mps" else x.double()


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Apply the gated delta rule with the algorithm that is faster for v's T tokens."""
    algorithm = recurrent if v.shape[1] <= _FEW_TOKENS else chunked
    return algorithm(q, k, v, g, beta, state)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Apply the gated delta rule token by token (for the arguments, see the module)."""
    q, k, v, decay, beta = _by_head(q, k, v, wide(g, g.device).exp(), beta)  # [B * Hv, T, width]
    flat = state.view(-1, *state.shape[2:])
    out = tensors.empty_like(v)
    for token in range(v.shape[1]):
        now = slice(token, token + 1)
        flat.mul_(decay[:, now])
        change = (v[:, now] - tensors.bmm(k[:, now], flat)).mul_(beta[:, now])
        flat.baddbmm_(k[:, now].transpose(1, 2), change)
        out[:, now] = tensors.bmm(q[:, now], flat)
    return out.view(state.shape[0], -1, *out.shape[1:]).transpose(1, 2)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Apply the gated delta rule in chunks of 64 tokens (arguments: see the module).

    Token i of a chunk adds the outer product of k_i and d_i to the state. The vectors d_i are the solution of a
    triangular system of equations, where S is the state before the chunk:

        d_i + beta_i sum_{j<i} exp(g_{j+1} + .. + g_i) (k_i k_j) d_j = beta_i (v_i - exp(g_1 + .. + g_i) k_i S)

    The temporary memory grows with the number of tokens, so callers split long sequences into several calls.
    """
    length = v.shape[1]
    q, k, v, g, beta = (by_chunk(x) for x in _by_head(q, k, v, g, beta))  # [chunks, B * Hv, CHUNK, width]
    since_start = g.cumsum(2).exp_()
    between = decay_between(g)  # [chunks, B * Hv, CHUNK, CHUNK]
    scores = tensors.matmul(q, k.transpose(2, 3)).mul_(between)
    system = tensors.matmul(k * beta, k.transpose(2, 3)).mul_(between).tril_(-1)
    identity = tensors.eye(CHUNK, device=v.device).expand_as(system)
    # Invert by forward substitution. A sum of powers of `system` would be inexact if keys repeat.
    inverse = tensors.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    wanted, q, stale = v * beta, q * since_start, k * beta * since_start
    decayed_keys = (k * between[:, :, -1, :, None]).transpose(2, 3)
    survives = since_start[:, :, -1:]

    flat = state.view(-1, *state.shape[2:])
    out = tensors.empty_like(v)
    for chunk in range(v.shape[0]):
        change = tensors.bmm(inverse[chunk], tensors.baddbmm(wanted[chunk], stale[chunk], flat, alpha=-1))
        tensors.baddbmm(tensors.bmm(q[chunk], flat), scores[chunk], change, out=out[chunk])
        flat.mul_(survives[chunk]).baddbmm_(decayed_keys[chunk], change)
    out = out.transpose(0, 1).reshape(state.shape[0], state.shape[1], -1, state.shape[3])  # [B, Hv, padded T, Dv]
    return out[:, :, :length].transpose(1, 2)


def log_decay(a: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """Return the decay's logarithm, `-rate * softplus(a + bias)`, float32 [..., Hv]."""
    return tensors.nn.functional.softplus(wide(a, a.device) + bias).mul_(-rate).float()


def _unit(x: Tensor) -> Tensor:
    """Return each vector of x [..., D] divided by its length, as float32."""
    x = x.float()
    return x * x.square().sum(-1, keepdim=True).add_(_EPSILON).rsqrt_()


def _by_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Return the five inputs by value head, float32 [sequences * Hv, tokens, width].

    Each head of q and k is scaled to length 1 and repeated for its value heads. q is also divided by sqrt(Dk).
    """
    repeats = v.shape[2] // k.shape[2]
    q, k = (_unit(x).repeat_interleave(repeats, dim=2) for x in (q, k))
    q *= q.shape[-1] ** -0.5
    return tuple(x.float().transpose(1, 2).flatten(0, 1) for x in (q, k, v, g[..., None], beta[..., None]))


def by_chunk(x: Tensor) -> Tensor:
    """Return the tokens x [N, tokens, width] as chunks [chunks, N, CHUNK, width]."""
    # The last chunk is padded with tokens of zeros. These tokens do not change the state, because they add nothing and
    # their decay exp(0) is 1.
    x = tensors.pad(x, (0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).transpose(0, 1).contiguous()


def decay_between(g: Tensor) -> Tensor:
    """Return the state's decay from token j to i of a chunk, [..., i, j]; 0 if j > i.

    Args:
        g: [..., CHUNK, 1], logarithm of the decay of each token.
    """
    # For each j, the function sums the logarithms from token j + 1 on. Differences of sums from the start of the chunk
    # would lose the precision of small decays after large decays. No sum is above 0, so no exponential overflows.
    earlier = tensors.ones(CHUNK, CHUNK, dtype=tensors.bool, device=g.device).tril(-1)
    sums = g.expand(*g.shape[:-1], CHUNK).masked_fill(~earlier, 0).cumsum(-2)
    return sums.exp_().tril_()
