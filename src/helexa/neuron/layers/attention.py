"""Grouped-query attention over the paged KV cache."""

from dataclasses import dataclass

from torch import Tensor

from helexa.neuron.engine.batch import Batch
from helexa.neuron.layers.loader import Loader


@dataclass(frozen=True)
class Step:
    """What all layers of one forward pass share.

    Attributes:
        cos, sin: rotary tables (see `Rope.tables`).
    """

    batch: Batch
    page_size: int
    cos: Tensor
    sin: Tensor


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
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        wide, narrow = heads * head_dim, kv_heads * head_dim
        outputs = {f"{prefix}.q_proj": wide, f"{prefix}.k_proj": narrow, f"{prefix}.v_proj": narrow}
        self._qkv = loader.linear(outputs, hidden)
        self._out = loader.linear({f"{prefix}.o_proj": hidden}, wide)
        self._q_norm = self._k_norm = None
        if qk_norm_eps is not None:
            self._q_norm = loader.norm(f"{prefix}.q_norm", head_dim, qk_norm_eps)
            self._k_norm = loader.norm(f"{prefix}.k_norm", head_dim, qk_norm_eps)

    def __call__(self, x: Tensor, cache: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]; writes this step's K and V to `cache` first."""
        heads = self._heads
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)  # [T, heads + 2 * kv_heads, D]
        if self._q_norm is not None and self._k_norm is not None:
            qkv[:, :heads] = self._q_norm(qkv[:, :heads])
            qkv[:, heads : heads + self._kv_heads] = self._k_norm(qkv[:, heads : heads + self._kv_heads])
        queries = self._ops.rotate_store(qkv, heads, step.cos, step.sin, cache, step.batch.slots)
        out = self._ops.attend(queries, cache, step.page_size, step.batch)
        return self._out(out.reshape(x.shape[0], -1))
