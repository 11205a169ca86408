"""Multi-head latent attention (MLA; DeepSeek-V2, 2024) over the paged KV cache."""

from dataclasses import dataclass

from helexa.neuron.layers.attention import attend
from helexa.neuron.layers.block import Step
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.rope import Rope
from helexa.neuron.ops.batch import AttentionKind
from helexa.neuron.ops.linear_and_norm_operators import HeadLinearOp
from helexa.neuron.ops.rank_group_and_shares import RowRange
from helexa.neuron.tensors import Tensor

_EPS = 1e-6  # epsilon of the norms inside the layer, independent of the model's `rms_norm_eps`


@dataclass(frozen=True)
class LatentSizes:
    """Widths of a layer with latent attention."""

    rank: int  # L, width of the latent vector from which the keys and values of all heads are computed
    rotated: int  # R, number of rotated numbers of each query head, and of the key that all heads share
    plain: int  # width of the part of each query head that is not rotated
    value: int  # width of each head's value
    # width of the latent vector from which the queries are computed; None if they are computed from the hidden state
    query_rank: int | None


class LatentAttention:
    """Self-attention whose keys and values come from one latent vector per position.

    The class implements `Mixer`. The KV cache has one head of R + L numbers per position: the rotated key and the
    normalized latent vector. With tensor parallelism, each rank computes some of the heads, and has the whole KV cache.

    Args:
        rope: rotary embedding of R numbers.
        scale: factor on the products of queries and keys.
        interleaved: whether the rotary embedding rotates the numbers 2i and 2i + 1. If False, it rotates the numbers i
            and i + R / 2.
    """

    state_bytes = 0

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        *,
        hidden: int,
        heads: int,
        sizes: LatentSizes,
        rope: Rope,
        scale: float,
        interleaved: bool,
    ) -> None:
        self._ops, self._sizes, self._rope, self._interleaved = loader.ops, sizes, rope, interleaved
        own_heads = loader.head_shares(heads, heads).queries
        own = own_heads.own
        self._heads, self._width = len(own), sizes.rotated + sizes.rank
        rows = own.times(sizes.plain + sizes.rotated)
        if sizes.query_rank is None:
            self._query_latent = self._query_norm = None
            self._queries = loader.column_parallel_linear({f"{prefix}.q_proj": rows}, hidden)
        else:
            self._query_latent = loader.replicated_linear(f"{prefix}.q_a_proj", sizes.query_rank, hidden)
            self._query_norm = loader.norm(f"{prefix}.q_a_layernorm", sizes.query_rank, _EPS)
            self._queries = loader.column_parallel_linear({f"{prefix}.q_b_proj": rows}, sizes.query_rank)
        self._latent = loader.replicated_linear(f"{prefix}.kv_a_proj_with_mqa", self._width, hidden)
        self._norm = loader.vector(f"{prefix}.kv_a_layernorm.weight", sizes.rank)
        self._to_latent, self._to_values = _head_projections(loader, prefix, sizes, own)
        self._out = loader.row_parallel_linear(f"{prefix}.o_proj", hidden, own_heads.times(sizes.value))
        self._kind = AttentionKind(scale)
        self.page_bytes = loader.ops.page_bytes(1, self._width, values=False)

    def new_cache(self, pages: int, slots: int) -> Tensor:
        """Return a zeroed KV cache of `pages` pages; `slots` has no effect."""
        return self._ops.new_cache(1, pages, self._width, values=False)

    def __call__(self, x: Tensor, cache: Tensor, step: Step, rows: Tensor | None = None) -> Tensor:
        """Write the latents of all rows to `cache`, and return the outputs (see `Mixer`)."""
        ops, sizes = self._ops, self._sizes
        queries = x
        if self._query_latent is not None and self._query_norm is not None:
            queries = self._query_norm(self._query_latent(x))
        queries = self._queries(queries).view(x.shape[0], self._heads, sizes.plain + sizes.rotated)
        # Keys and values of the heads are never computed. The key projection is applied to the queries instead, so that
        # the product of a query and a latent vector is the score. The value projection is applied to the weighted sum
        # of latent vectors.
        absorbed = self._to_latent(queries)  # [T, heads, L]
        qkv = ops.join_latent(queries, absorbed, self._latent(x), self._norm, _EPS, self._interleaved)
        queries = ops.rotate_store(qkv, self._heads, step.tables(self._rope), cache, step.batch.slots)
        # [T, heads, R + L]; with `rows`, [S, heads, R + L]
        latents = attend(ops, queries, cache, step, self._kind, rows)
        return self._out(self._to_values(latents, sizes.rotated).view(latents.shape[0], self._heads * sizes.value))


def _head_projections(
    loader: Loader, prefix: str, sizes: LatentSizes, own: RowRange
) -> tuple[HeadLinearOp, HeadLinearOp]:
    """Return two per-head operators: query to latent space, and latent to value."""
    heads, rank, plain, value = own.total, sizes.rank, sizes.plain, sizes.value
    numbers, to_latent, to_values = range(own.start, own.stop), f"{prefix}.k_b_proj.weight", f"{prefix}.v_b_proj.weight"
    # GGUF files have a tensor for keys, [heads, L, plain], and one for values, [heads, value, L]. Safetensors files
    # have one matrix for both.
    if to_latent in loader:
        keys = [loader.matrix(to_latent, (heads, rank, plain), head) for head in numbers]
        values = [loader.matrix(to_values, (heads, value, rank), head) for head in numbers]
        return loader.head_linear(keys), loader.head_linear(values)
    name, total = f"{prefix}.kv_b_proj.weight", heads * (plain + value)
    keys, values = [], []
    for head in numbers:
        start = head * (plain + value)
        of_keys, of_values = (
            RowRange(start, start + plain, total),
            RowRange(start + plain, start + plain + value, total),
        )
        # The checkpoint's matrix maps a latent vector to a key. Its transpose maps a query to the latent space.
        keys.append(loader.transposed(name, f"{to_latent}#{head}", (total, rank), of_keys))
        values.append(loader.matrix(name, (total, rank), ranges=(of_values,)))
    return loader.head_linear(keys), loader.head_linear(values)
