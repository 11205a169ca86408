"""Grouped-query attention over the paged KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from helexa.neuron import tensors
from helexa.neuron.layers.block import Step
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.rope import Rope
from helexa.neuron.ops.batch import AttentionKind
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import HeadNorms, LinearOp, QueryTemperature
from helexa.neuron.ops.rank_group_and_shares import RowRange
from helexa.neuron.tensors import Tensor


@dataclass(frozen=True)
class QkNorms:
    """The RMS norms of an attention layer's queries and keys."""

    eps: float
    offset: float = 0.0  # Number to add to the norm weights in checkpoints
    names: tuple[str, str] = ("q_norm", "k_norm")  # Names of the norms of queries and keys in checkpoints
    # Whether one norm covers all query heads, and one all key heads. If False, each head is normalized.
    whole: bool = False
    last: bool = False  # Whether the norms are applied after the rotary embedding. Only for norms of each head.
    weighted: bool = True  # Whether checkpoints have weights of the norms. Otherwise, the weights are 1.
    values: bool = False  # Whether each value head is normalized, too, with a weight of 1


class Attention:
    """Self-attention with grouped key and value heads (Ainslie et al., 2023).

    The class implements `Mixer`. `heads` query heads share `kv_heads` key and value heads. With tensor parallelism,
    each rank computes some of the heads.

    Args:
        inputs: width of the input; None for `hidden`, the width of the output.
        scale: factor on the products of queries and keys; None for 1 / sqrt(head_dim).
        window: number of positions that each query attends to, including its own; None for all positions.
        sinks: whether the heads have attention sinks: one score per head, which the softmax of the head includes.
        cap: soft cap of the scores, `cap * tanh(score / cap)`; None for no cap.
        temperature: factor on the queries that grows with their position; None for no factor.
        interleaved: whether the rotary embedding of the checkpoint rotates adjacent numbers of a head (2i and 2i + 1).
            If False, it rotates the numbers i and i + head_dim / 2.
        gated: whether `q_proj` yields a query and a gate for each head. The sigmoid of the gate multiplies the head's
            output.
        gate: name of a projection to gates, one per number of the heads' output. The sigmoids of the gates multiply the
            output. None for no gates.
        causal: whether image tokens attend only to earlier tokens, even if they attend to their whole image in other
            layers.
        output: name of the output projection.
        keys_are_values: whether the keys, before norm and rotation, are also the values: the layer has no `v_proj`.
        shares_kv: whether the layer has only queries, and reads the keys and values of another layer's cache.
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
        inputs: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        cap: float | None = None,
        causal: bool = False,
        norms: QkNorms | None = None,
        temperature: QueryTemperature | None = None,
        interleaved: bool = False,
        gated: bool = False,
        gate: str | None = None,
        output: str = "o_proj",
        keys_are_values: bool = False,
        shares_kv: bool = False,
    ) -> None:
        self._ops = loader.ops
        inputs = hidden if inputs is None else inputs
        shares = loader.head_shares(heads, kv_heads)
        queries, kv = shares.queries.own, shares.kv_heads
        self._heads, self._kv_heads, self._head_dim = len(queries), len(kv), head_dim
        self._rope = rope
        self._temperature = temperature
        query_rows, key_rows, value_rows = queries.times(head_dim), kv.times(head_dim), kv.times(head_dim)
        if interleaved:  # the kernels rotate the first half of the rotated numbers of a head with the second half
            query_rows, key_rows = (rows.halved(head_dim, rope.rotated) for rows in (query_rows, key_rows))
        outputs = {f"{prefix}.q_proj": query_rows}
        if not shares_kv:
            outputs[f"{prefix}.k_proj"] = key_rows
            if not keys_are_values:
                outputs[f"{prefix}.v_proj"] = value_rows
        self._gated_q = None
        if gated:
            # In `q_proj`, the rows of queries and gates alternate by head, so `q_proj` is multiplied separately.
            del outputs[f"{prefix}.q_proj"]
            self._gated_q = loader.column_parallel_linear({f"{prefix}.q_proj": queries.times(2 * head_dim)}, inputs)
        self._gate = None
        if gate is not None:
            self._gate = loader.column_parallel_linear({f"{prefix}.{gate}": queries.times(head_dim)}, inputs)
        if norms is not None and norms.whole:
            self._qkv: LinearOp = NormedProjections(loader, prefix, outputs, inputs, norms)
        else:
            # Some checkpoints (Phi-3) have queries, keys and values as one tensor.
            self._qkv = loader.fused_linear(f"{prefix}.qkv_proj", outputs, inputs)
        self._out = loader.row_parallel_linear(f"{prefix}.{output}", hidden, shares.queries.times(head_dim))
        self._norms = None
        if norms is not None and not norms.whole:
            names = norms.names[:1] if shares_kv else norms.names
            weights = [tensors.ones(head_dim, device=loader.ops.device)]
            if norms.weighted:
                weights = [loader.vector(f"{prefix}.{name}.weight", head_dim) + norms.offset for name in names]
            self._norms = HeadNorms(weights[0], weights[-1], norms.eps, norms.values, norms.last)
        sink = loader.vector(f"{prefix}.sinks", heads, (queries,)) if sinks else None
        self._kind = AttentionKind(head_dim**-0.5 if scale is None else scale, window, sink, cap, causal)
        # The memory of a shared cache is counted in the layer that owns the cache.
        self.page_bytes = 0 if shares_kv else loader.ops.page_bytes(self._kv_heads, head_dim)

    def new_cache(self, pages: int, slots: int) -> Tensor:
        """Return a zeroed KV cache of `pages` pages; `slots` has no effect."""
        return self._ops.new_cache(self._kv_heads, pages, self._head_dim)

    def __call__(self, x: Tensor, cache: Tensor, step: Step, rows: Tensor | None = None) -> Tensor:
        """Write K and V to `cache` (not with `shares_kv`); return outputs (see `Mixer`)."""
        gated = None
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)  # one of the shapes in `Ops.rotate_store`
        if self._gated_q is not None:
            gated = self._gated_q(x).view(x.shape[0], self._heads, 2, self._head_dim)
            qkv = self._ops.join_queries(gated, qkv)
        if self._gate is not None:
            gated = self._gate(x).view(x.shape[0], self._heads, self._head_dim)
        if self._temperature is not None:
            qkv = self._ops.scale_queries(qkv, self._heads, step.batch.positions, self._temperature)
        tables = step.tables(self._rope)
        queries = self._ops.rotate_store(qkv, self._heads, tables, cache, step.batch.slots_of(self._kind), self._norms)
        out = attend(self._ops, queries, cache, step, self._kind, rows)
        if gated is not None:
            out = self._ops.gate_heads(out, gated if rows is None else _chosen(self._ops, gated, rows))
        return self._out(out.view(out.shape[0], self._heads * self._head_dim))


def attend(ops: Ops, queries: Tensor, cache: Tensor, step: Step, kind: AttentionKind, rows: Tensor | None) -> Tensor:
    """Return the attention of `queries` [T, heads, D], or only of the S rows `rows`.

    The keys and values of all T rows must be in `cache`. `rows` must be None or `step.batch.sample_rows`. After
    `Step.narrow`, `rows` must be None, and `queries` has only the rows `step.batch.sample_rows`.
    """
    if rows is None:
        return (ops.attend_sampled if step.is_narrow else ops.attend)(queries, cache, step.batch, kind)
    if step.batch.has_unneeded_rows:
        return ops.attend_sampled(_chosen(ops, queries, rows), cache, step.batch, kind)
    return _chosen(ops, ops.attend(queries, cache, step.batch, kind), rows)


def _chosen(ops: Ops, x: Tensor, rows: Tensor) -> Tensor:
    return ops.choose_rows(x.view(x.shape[0], -1), rows).view(rows.shape[0], *x.shape[1:])


class NormedProjections:
    """The projections to queries, keys and values; one norm for queries, one for keys.

    Args:
        outputs: for each projection (its name, in the order query, key, value), the rows of this rank.
    """

    def __init__(
        self, loader: Loader, prefix: str, outputs: Mapping[str, RowRange], inputs: int, norms: QkNorms
    ) -> None:
        self._ops, self._eps = loader.ops, norms.eps
        self._own = list(outputs.values())[:2]
        query, key = (
            loader.vector(f"{prefix}.{name}.weight", rows.total) + norms.offset
            for name, rows in zip(norms.names, self._own, strict=True)
        )
        self._weights = query, key
        self._gathered: list[LinearOp] = []
        # Each of the two norms covers the heads of all ranks, so the ranks gather queries and keys.
        if loader.ranks > 1:
            names, outputs = list(outputs)[:2], {name: outputs[name] for name in list(outputs)[2:]}
            for name, rows in zip(names, self._own, strict=True):
                shares = loader.shares(rows.total)
                product = loader.column_parallel_linear({name: shares.own}, inputs)
                self._gathered.append(loader.gather_outputs(product, shares))
        self._product = loader.column_parallel_linear(outputs, inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's queries, keys, values [rows, outputs] for x [rows, inputs]."""
        if not self._gathered:
            return self._ops.norm_columns(self._product(x), self._weights, self._eps)
        both = tensors.cat([product(x) for product in self._gathered], dim=1)
        both = self._ops.norm_columns(both, self._weights, self._eps)
        queries, keys = self._own
        own_keys = both[:, queries.total + keys.start : queries.total + keys.stop]
        return tensors.cat([both[:, queries.start : queries.stop], own_keys, self._product(x)], dim=1)
