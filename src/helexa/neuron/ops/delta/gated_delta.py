"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464) in plain torch and float32.

Each head keeps a state S [Dk, Dv]. A token first decays the state. The token then replaces a share `beta` of the
content stored under its key by its value, and reads the state with its query:

    S <- exp(g) S;    S <- S + k (beta (v - k S));    out = q S

Two algorithms compute the same result: `recurrent` for few tokens and `chunked` for many. For B sequences with T tokens
each, both take

    q, k:   [B, T, Hk, Dk]; each head is divided by its length, and q by sqrt(Dk). Each key head serves Hv / Hk
        consecutive value heads
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
"""Number of tokens per chunk in `chunked`."""
_FEW_TOKENS = 16  # token count up to which `recurrent` is faster
_EPSILON = 1e-6


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Apply the rule with the faster algorithm for this token count; see the module for shapes."""
    form = recurrent if v.shape[1] <= _FEW_TOKENS else chunked
    return form(q, k, v, g, beta, state)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Apply the rule token by token; see the module for shapes."""
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
    """Apply the rule chunk by chunk; see the module for shapes.

    The memory grows with the number of tokens: pass long sequences in several calls.

    The state change d of each token in a chunk depends on the earlier tokens by a triangular system:

        d_i + beta_i sum_{j<i} exp(g_{j+1} + .. + g_i) (k_i k_j) d_j = beta_i (v_i - exp(g_1 + .. + g_i) k_i S)

    Forward substitution solves the system and stays exact if keys repeat; sums of powers of the matrix do not.
    """
    length = v.shape[1]
    q, k, v, g, beta = (_by_chunk(x) for x in _by_head(q, k, v, g, beta))  # [chunks, B * Hv, CHUNK, width]
    since_start = g.cumsum(2).exp_()
    between = _decay_between(g)  # [chunks, B * Hv, CHUNK, CHUNK]
    scores = torch.matmul(q, k.transpose(2, 3)).mul_(between)
    system = torch.matmul(k * beta, k.transpose(2, 3)).mul_(between).tril_(-1)
    identity = torch.eye(CHUNK, device=v.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    wanted, q, stale = v * beta, q * since_start, k * beta * since_start
    decayed_keys = (k * between[:, :, -1, :, None]).transpose(2, 3)
    survives = since_start[:, :, -1:]

    flat = state.view(-1, *state.shape[2:])
    out = torch.empty_like(v)
    for chunk in range(v.shape[0]):
        change = torch.bmm(inverse[chunk], torch.baddbmm(wanted[chunk], stale[chunk], flat, alpha=-1))
        torch.baddbmm(torch.bmm(q[chunk], flat), scores[chunk], change, out=out[chunk])
        flat.mul_(survives[chunk]).baddbmm_(decayed_keys[chunk], change)
    out = out.transpose(0, 1).reshape(state.shape[0], state.shape[1], -1, state.shape[3])  # [B, Hv, padded T, Dv]
    return out[:, :, :length].transpose(1, 2)


def convolve(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Apply a causal depthwise convolution to each column, then SiLU.

    Args:
        x: [B, T, C].
        weight: [K, C], float32; the last row applies to the current token.
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
    """Return g [..., Hv], the negative rate of each head times `softplus(a + bias)`, in float32."""
    return F.softplus(a.float() + bias).mul_(-rate)


def _unit(x: Tensor) -> Tensor:
    """Return each head of [..., D] divided by its length, as float32."""
    x = x.float()
    return x * x.square().sum(-1, keepdim=True).add_(_EPSILON).rsqrt_()


def _by_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Return all inputs as float32 [B * Hv, T, width], with unit-length q and k and repeated key heads."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (_unit(x).repeat_interleave(repeats, dim=2) for x in (q, k))
    q *= q.shape[-1] ** -0.5
    return tuple(x.float().transpose(1, 2).flatten(0, 1) for x in (q, k, v, g[..., None], beta[..., None]))


def _by_chunk(x: Tensor) -> Tensor:
    """Reshape [N, T, width] to [chunks, N, CHUNK, width]; the last chunk is padded with zeros, which change nothing."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).transpose(0, 1).contiguous()


def _decay_between(g: Tensor) -> Tensor:
    """Return the decay of token j's contribution at token i of the same chunk, [..., i, j]; 0 for j > i.

    For each j, the logarithms are summed from j on. Differences of sums from the start of the chunk would lose small
    decays after large decays. No sum is above 0, so no exponential overflows.

    Args:
        g: [..., CHUNK, 1].
    """
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    sums = g.expand(*g.shape[:-1], CHUNK).masked_fill(~earlier, 0).cumsum(-2)
    return sums.exp_().tril_()
