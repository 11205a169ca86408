"""Grouped-query attention over the paged KV cache."""

from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.rope import Rope
from helexa.neuron.layers.step import Step
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.norm import HeadNorms


class Attention:
    """Self-attention with `heads` query heads that share `kv_heads` key and value heads (Ainslie et al., 2023).

    The class implements `Mixer`, the sublayer of a decoder layer that mixes positions. With tensor parallelism, each
    rank computes some of the heads.

    Args:
        rope: rotary embedding of this layer.
        scale: factor on the products of queries and keys; None for 1 / sqrt(head_dim).
        window: number of positions that each query attends to, including its own; None for all positions.
        sinks: whether the heads have attention sinks: the checkpoint's tensor `sinks` holds one score per head, and
            the softmax of the head includes this score.
        norms: (epsilon, offset) of the RMS norms `q_norm` and `k_norm`, which are applied to each query and key head
            before the rotary embedding. The offset is added to the norm weights of the checkpoint. None for no norms.
        gated: whether `q_proj` yields a query and a gate for each head. The sigmoid of the gate multiplies the head's
            output.
    """

    state_bytes = 0

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        scale: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        norms: tuple[float, float] | None = None,
        gated: bool = False,
    ) -> None:
        self._ops = loader.ops
        shares = loader.head_shares(heads, kv_heads)
        queries, kv = shares.queries.own, shares.kv_heads
        self._heads, self._kv_heads, self._head_dim = len(queries), len(kv), head_dim
        self._rope = rope
        key_rows = kv.times(head_dim)
        outputs = {f"{prefix}.k_proj": key_rows, f"{prefix}.v_proj": key_rows}
        if gated:
            self._gated_q = loader.local_linear({f"{prefix}.q_proj": queries.times(2 * head_dim)}, hidden)
        else:
            self._gated_q = None
            outputs = {f"{prefix}.q_proj": queries.times(head_dim), **outputs}
        self._qkv = loader.local_linear(outputs, hidden)
        self._out = loader.reduced_linear(f"{prefix}.o_proj", hidden, shares.queries.times(head_dim))
        self._norms = None
        if norms is not None:
            eps, offset = norms
            query, key = (loader.vector(f"{prefix}.{name}.weight", head_dim) + offset for name in ("q_norm", "k_norm"))
            self._norms = HeadNorms(query, key, eps)
        sink = loader.vector(f"{prefix}.sinks", heads, (queries,)) if sinks else None
        self._kind = AttentionKind(head_dim**-0.5 if scale is None else scale, window, sink)
        self.page_bytes = loader.ops.page_bytes(self._kv_heads, head_dim)

    def new_cache(self, pages: int, slots: int) -> Tensor:
        """Return a zeroed KV cache of `pages` pages for this layer. Attention ignores `slots`, the state slots."""
        return self._ops.new_cache(self._kv_heads, pages, self._head_dim)

    def __call__(self, x: Tensor, cache: Tensor, step: Step, rows: Tensor | None = None) -> Tensor:
        """Write the keys and values of all rows to the KV cache `cache`, and return the attention output.

        Args:
            x: [T, H], inputs of the layer: T rows (tokens of the batch), H the hidden size.
            cache: KV cache of this layer, from `new_cache`.
            step: the batch and its rotary tables.
            rows: int32 [S], indexes of the rows to return; None for all rows.

        Returns:
            [T, H], or [S, H] if `rows` is given.
        """
        gated = None
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)  # [T, heads + 2 * kv_heads, D]
        if self._gated_q is not None:
            gated = self._gated_q(x).view(x.shape[0], self._heads, 2, self._head_dim)
            qkv = self._ops.join_queries(gated, qkv)
        tables = step.tables(self._rope)
        queries = self._ops.rotate_store(qkv, self._heads, tables, cache, step.batch.slots, self._norms)
        out = self._ops.attend(queries, cache, step.batch, self._kind)
        if gated is not None:
            out = self._ops.gate_heads(out, gated)
        out = out.view(x.shape[0], -1)
        if rows is not None:
            out = self._ops.choose_rows(out, rows)
        return self._out(out)
