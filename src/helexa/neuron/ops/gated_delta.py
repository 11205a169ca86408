"""The gated delta rule in plain torch and float32.

Source: Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464.

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

from helexa.neuron import tensors
from helexa.neuron.tensors import Device, Tensor

CHUNK = 64  # Number of tokens per chunk in `chunked`

_FEW_TOKENS = 16  # token count up to which `recurrent` is faster than `chunked`
_EPSILON = 1e-6


def wide(x: Tensor, device: Device) -> Tensor:
    """Return `x` as float64, or as float32 if `device` is MPS, which has no float64."""
    # Callers convert numbers before functions such as the exponential. On a CPU, vector and scalar instructions compute
    # the exponential of a float32 number differently. The number of elements, and therefore the number of heads on this
    # rank, decides which instructions compute an element. With float64, the results do not depend on this number.
    return x.float() if device.type == "mps" else x.double()


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Apply the gated delta rule with the faster algorithm for this many tokens."""
    algorithm = recurrent if v.shape[1] <= _FEW_TOKENS else chunked
    return algorithm(q, k, v, g, beta, state)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Apply the gated delta rule token by token."""
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
    """Apply the gated delta rule in chunks of 64 tokens.

    Token i of a chunk adds k_i d_i to the state. The vectors d_i are the solution of a triangular system of equations,
    where S is the state before the chunk:

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
    # Forward substitution. A sum of powers of the matrix would be inexact if keys repeat.
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
    """Return the five inputs as float32 [B * Hv, T, width], by value head.

    Each head of q and k is scaled to length 1 and repeated for its value heads. q is also divided by sqrt(Dk).
    """
    repeats = v.shape[2] // k.shape[2]
    q, k = (_unit(x).repeat_interleave(repeats, dim=2) for x in (q, k))
    q *= q.shape[-1] ** -0.5
    return tuple(x.float().transpose(1, 2).flatten(0, 1) for x in (q, k, v, g[..., None], beta[..., None]))


def by_chunk(x: Tensor) -> Tensor:
    """Divide T tokens [N, T, width] into chunks [chunks, N, CHUNK, width]."""
    # Tokens of zeros do not change the state: they add nothing, and their decay exp(0) is 1.
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
