"""Grouped-query attention over the paged KV cache."""

import torch
from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.rope import Rope
from helexa.neuron.layers.step import Step
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.norm import HeadNorms


class Attention:
    """Grouped-query attention (Ainslie et al., 2023) with its projections; implements `Mixer`.

    Args:
        heads: number of query heads.
        kv_heads: number of key heads, and of value heads. Consecutive query heads share a key and a value head.
        rope: rotary embedding of this layer.
        scale: factor on the products of queries and keys; None for 1 / sqrt(head_dim).
        window: number of positions that each query attends to, including its own position; None for all positions.
        sinks: whether the checkpoint has attention sinks. The tensor `prefix.sinks` holds one extra score per head,
            which is added to every softmax of the head.
        norms: the epsilon and the weight offset of the RMS norms `q_norm` and `k_norm`, which normalize each query and
            key head before rotation. The offset is added to the norm weights in the checkpoint. None for no norms.
        gated: whether `q_proj` computes a gate in addition to the query of each head. The output of the head is
            multiplied by the sigmoid of its gate.
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
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._rope = rope
        query_width, kv_width = heads * head_dim, kv_heads * head_dim
        outputs = {f"{prefix}.q_proj": query_width, f"{prefix}.k_proj": kv_width, f"{prefix}.v_proj": kv_width}
        self._gated_q = loader.linear({f"{prefix}.q_proj": 2 * query_width}, hidden) if gated else None
        if gated:
            del outputs[f"{prefix}.q_proj"]
        self._qkv = loader.linear(outputs, hidden)
        self._out = loader.linear({f"{prefix}.o_proj": hidden}, query_width)
        self._norms = None
        if norms is not None:
            eps, offset = norms
            query, key = (loader.vector(f"{prefix}.{name}.weight", head_dim) + offset for name in ("q_norm", "k_norm"))
            self._norms = HeadNorms(query, key, eps)
        sink = loader.vector(f"{prefix}.sinks", heads) if sinks else None
        self._kind = AttentionKind(head_dim**-0.5 if scale is None else scale, window, sink)
        self.page_bytes = loader.ops.page_bytes(kv_heads, head_dim)

    def new_cache(self, pages: int, slots: int) -> Tensor:
        """Return a zeroed KV cache of `pages` pages for this layer; `slots` is ignored."""
        return self._ops.new_cache(self._kv_heads, pages, self._head_dim)

    def __call__(self, x: Tensor, cache: Tensor, step: Step, rows: Tensor | None = None) -> Tensor:
        """Write the keys and values of all rows to `cache`, and return the attention output.

        Args:
            x: [T, H], inputs of the layer: T rows (tokens of the batch), H the hidden size.
            rows: int32 [S], indexes of the rows to return; None for all rows.

        Returns:
            [T, H], or [S, H] if `rows` is given.
        """
        gate = None
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)  # [T, heads + 2 * kv_heads, D]
        if self._gated_q is not None:
            query, gate = self._gated_q(x).view(x.shape[0], self._heads, 2, self._head_dim).unbind(2)
            qkv = torch.cat((query, qkv), dim=1)
        tables = step.tables(self._rope)
        queries = self._ops.rotate_store(qkv, self._heads, tables, cache, step.batch.slots, self._norms)
        out = self._ops.attend(queries, cache, step.batch, self._kind)
        if gate is not None:
            out = out * gate.sigmoid()
        out = out.view(x.shape[0], -1)
        return self._out(out if rows is None else self._ops.choose_rows(out, rows))
