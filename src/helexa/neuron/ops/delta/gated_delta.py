"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464) in plain torch and float32.

Each head keeps a state S [Dk, Dv]. A token lets it decay, replaces a share `beta` of what it holds under the token's
key by the token's value, and reads it with the query:

    S <- exp(g) S;    S <- S + k (beta (v - k S));    out = q S

Two forms of it give the same, `recurrent` for few tokens and `chunked` for many. Both take, for B sequences and T
tokens of each,

    q, k:   [B, T, Hk, Dk]; each head is divided by its length, and q by sqrt(Dk). Each serves Hv / Hk consecutive
            value heads
    v:      [B, T, Hv, Dv]
    g:      [B, T, Hv], logarithm of the decay, at most 0; float32
    beta:   [B, T, Hv], between 0 and 1; float32
    state:  [B, Hv, Dk, Dv], float32, contiguous; replaced by the state after the last token

and return float32 [B, T, Hv, Dv]. Reference: transformers `modeling_qwen3_next`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens that `chunked` takes at once."""
_FEW_TOKENS = 16  # up to which `recurrent` is quicker
_EPSILON = 1e-6


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The quicker form for this number of tokens; see the module for shapes."""
    form = recurrent if v.shape[1] <= _FEW_TOKENS else chunked
    return form(q, k, v, g, beta, state)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Token by token; see the module for shapes."""
    q, k, v, decay, beta = _by_head(q, k, v, g.exp(), beta)  # [B * Hv, T, width]
    flat = state.view(-1, *state.shape[2:])
    out = torch.empty_like(v)
    for token in range(v.shape[1]):
        now = slice(token, token + 1)
        flat.mul_(decay[:, now])
        change = (v[:, now] - torch.bmm(k[:, now], flat)).mul_(beta[:, now])
        flat.baddbmm_(k[:, now].transpose(1, 2), change)
        out[:, now] = torch.bmm(q[:, now], flat)
    return out.view(state.shape[0], -1, *out.shape[1:]).transpose(1, 2)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Chunk by chunk; see the module for shapes. Takes memory for all tokens at once: give long sequences in pieces.

    The changes d that the tokens of a chunk make depend on those before them, by a triangular system:

        d_i + beta_i sum_{j<i} exp(g_{j+1} + .. + g_i) (k_i k_j) d_j = beta_i (v_i - exp(g_1 + .. + g_i) k_i S)

    It is solved by forward substitution, which stays exact where keys repeat; sums of powers of the matrix do not.
    """
    length = v.shape[1]
    q, k, v, g, beta = (_by_chunk(x) for x in _by_head(q, k, v, g, beta))  # [chunks, B * Hv, CHUNK, width]
    since_start = g.cumsum(2).exp_()
    between = _decay_between(g)  # [chunks, B * Hv, CHUNK, CHUNK]
    seen = torch.matmul(q, k.transpose(2, 3)).mul_(between)
    system = torch.matmul(k * beta, k.transpose(2, 3)).mul_(between).tril_(-1)
    identity = torch.eye(CHUNK, device=v.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    wanted, q, stale = v * beta, q * since_start, k * beta * since_start
    kept = (k * between[:, :, -1, :, None]).transpose(2, 3)
    survives = since_start[:, :, -1:]

    flat = state.view(-1, *state.shape[2:])
    out = torch.empty_like(v)
    for chunk in range(v.shape[0]):
        change = torch.bmm(inverse[chunk], torch.baddbmm(wanted[chunk], stale[chunk], flat, alpha=-1))
        torch.baddbmm(torch.bmm(q[chunk], flat), seen[chunk], change, out=out[chunk])
        flat.mul_(survives[chunk]).baddbmm_(kept[chunk], change)
    out = out.transpose(0, 1).reshape(state.shape[0], state.shape[1], -1, state.shape[3])  # [B, Hv, T and more, Dv]
    return out[:, :, :length].transpose(1, 2)


def convolve(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Causal depthwise convolution of each column with its own past, then SiLU.

    Args:
        x: [B, T, C].
        weight: [K, C], float32; the last row is for the token itself.
        state: [B, K - 1, C], the K - 1 tokens before x; replaced by the last K - 1 tokens.

    Returns:
        float32 [B, T, C].
    """
    tokens = torch.cat((state, x), dim=1)
    state.copy_(tokens[:, x.shape[1] :])
    tokens = tokens.float()
    out = tokens[:, : x.shape[1]] * weight[0]
    for past, row in enumerate(weight[1:], start=1):
        out.addcmul_(tokens[:, past : past + x.shape[1]], row)
    return F.silu(out, inplace=True)


def log_decay(a: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """g [..., Hv]: minus a rate per head, times a step `softplus(a + bias)` per token; all float32."""
    return F.softplus(a.float() + bias).mul_(-rate)


def _unit(x: Tensor) -> Tensor:
    """Each head of [..., D] divided by its length, as float32."""
    x = x.float()
    return x * x.square().sum(-1, keepdim=True).add_(_EPSILON).rsqrt_()


def _by_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys normalised, key heads repeated; everything as float32 [B * Hv, T, width]."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (_unit(x).repeat_interleave(repeats, dim=2) for x in (q, k))
    q *= q.shape[-1] ** -0.5
    return tuple(x.float().transpose(1, 2).flatten(0, 1) for x in (q, k, v, g[..., None], beta[..., None]))


def _by_chunk(x: Tensor) -> Tensor:
    """[N, T, width] -> [chunks, N, CHUNK, width]; what the last chunk lacks is zeros, which change nothing."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).transpose(0, 1).contiguous()


def _decay_between(g: Tensor) -> Tensor:
    """How much of token j is left at token i of the same chunk, [..., i, j]; 0 for later j.

    Logarithms are summed from j on, for each j: differences of sums from the start would lose small decays behind large
    ones. No sum is above 0, so that none overflows.

    Args:
        g: [..., CHUNK, 1].
    """
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    sums = g.expand(*g.shape[:-1], CHUNK).masked_fill(~earlier, 0).cumsum(-2)
    return sums.exp_().tril_()
