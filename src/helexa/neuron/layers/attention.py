"""Grouped-query attention over the paged KV cache."""

import torch
from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.rope import Rope
from helexa.neuron.layers.step import Step
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.norm import HeadNorms


class Attention:
    """Self-attention with `heads` query heads over `kv_heads` shared K and V heads (Ainslie et al., 2023); a mixer.

    Args:
        rope: rotary embedding of this layer.
        scale: factor on the products of queries and keys; None for 1 / sqrt(head_dim).
        window: number of positions that each query attends to, including its own; None for all.
        sinks: the checkpoint's tensor `sinks` holds one score per head, which takes part in every softmax.
        norms: (epsilon, offset) of RMS norms on each query and key head before rotation (`q_norm` and `k_norm`). The
            offset is added to the weights in the checkpoint. None for no norms.
        gated: `q_proj` yields a query and a gate for each head; the sigmoid of the gate multiplies the head's output.
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
        """Return the K and V cache of this layer for `pages` pages."""
        return self._ops.new_cache(self._kv_heads, pages, self._head_dim)

    def __call__(self, x: Tensor, cache: Tensor, step: Step, rows: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], or [S, H] for `rows` [S] only; writes this step's K and V to `cache` first."""
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
