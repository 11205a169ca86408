"""The scan of Mamba-2 in plain torch and float32.

Source: Dao and Gu, 2024, arXiv 2405.21060.

Each head has a state matrix S [N, P]. For each token with input x [P], keys B [N], query C [N] and step size dt, the
scan multiplies the state by a decay exp(g), with g = -rate * dt, adds the outer product of B and dt x, and reads the
state:

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

from helexa.neuron import tensors
from helexa.neuron.ops.gated_delta import by_chunk, decay_between, wide
from helexa.neuron.tensors import Tensor

_FEW_TOKENS = 16  # token count up to which `recurrent` is faster than `chunked`


def scan(x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Apply the scan with the faster algorithm for this many tokens."""
    algorithm = recurrent if x.shape[1] <= _FEW_TOKENS else chunked
    return algorithm(x, b, c, g, state)


def recurrent(x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Apply the scan token by token."""
    x, b, c, decay = _by_head(x, b, c, wide(g, g.device).exp().float())
    flat = state.view(-1, *state.shape[2:])
    out = tensors.empty_like(x)
    for token in range(x.shape[1]):
        now = slice(token, token + 1)
        flat.mul_(decay[:, now]).baddbmm_(b[:, now].transpose(1, 2), x[:, now])
        out[:, now] = tensors.bmm(c[:, now], flat)
    return out.view(state.shape[0], -1, *out.shape[1:]).transpose(1, 2)


def chunked(x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Apply the scan in chunks of 64 tokens.

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
    """Return the four inputs as [M * H, T, width], with its group's keys per head."""
    repeats = x.shape[2] // b.shape[2]
    b, c = (part.repeat_interleave(repeats, dim=2) for part in (b, c))
    return tuple(part.transpose(1, 2).flatten(0, 1) for part in (x, b, c, g[..., None]))
