"""Grouped-query attention over the paged KV cache."""

from dataclasses import dataclass

from torch import Tensor

from helexa.neuron.engine.batch import Batch
from helexa.neuron.layers.loader import Loader
from helexa.neuron.ops.norm import HeadNorms


@dataclass(frozen=True)
class Step:
    """What all layers of one forward pass share.

    Attributes:
        rope: cos and sin (see `Rope.tables`).
    """

    batch: Batch
    rope: tuple[Tensor, Tensor]


class Attention:
    """Self-attention with `heads` query heads over `kv_heads` shared K and V heads (Ainslie et al., 2023).

    Args:
        qk_norm_eps: normalise each query and key head (with `q_norm` and `k_norm`) before rotation; None does not.
    """

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None = None,
    ) -> None:
        self._ops = loader.ops
        self._heads, self._head_dim = heads, head_dim
        wide, narrow = heads * head_dim, kv_heads * head_dim
        outputs = {f"{prefix}.q_proj": wide, f"{prefix}.k_proj": narrow, f"{prefix}.v_proj": narrow}
        self._qkv = loader.linear(outputs, hidden)
        self._out = loader.linear({f"{prefix}.o_proj": hidden}, wide)
        self._norms = None
        if qk_norm_eps is not None:
            query, key = (loader.vector(f"{prefix}.{name}.weight", head_dim) for name in ("q_norm", "k_norm"))
            self._norms = HeadNorms(query, key, qk_norm_eps)

    def __call__(self, x: Tensor, cache: Tensor, step: Step, rows: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], or [S, H] for `rows` [S] only; writes this step's K and V to `cache` first."""
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)  # [T, heads + 2 * kv_heads, D]
        queries = self._ops.rotate_store(qkv, self._heads, step.rope, cache, step.batch.slots, self._norms)
        out = self._ops.attend(queries, cache, step.batch)
        out = out.view(x.shape[0], -1)
        return self._out(out if rows is None else self._ops.choose_rows(out, rows))
