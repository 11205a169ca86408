"""Kernels in plain torch that read only the tensors and tables of a batch, as GPU kernels do."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind, Batch
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.linear_and_norm_operators import HeadNorms
from helexa.neuron.ops.reference.attention import Chunk, attend_chunk
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.triton.launch_and_graphs import StepGraphs, without_capture


class TabledOps(ReferenceOps):
    """Attention by page tables; steps are captured and replayed like CUDA graphs."""

    name = "fixed addresses"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.fixed_addresses = True
        self._graphs = StepGraphs(without_capture)

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        self._graphs.capture(forward, blank)

    def forget(self) -> None:
        self._graphs.forget()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch, capture: bool = True) -> Tensor:
        return self._graphs.run(forward, batch)

    def rotate_store(
        self,
        qkv: Tensor,
        heads: int,
        rope: tuple[Tensor, Tensor],
        cache: Tensor,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate queries and keys, and store keys and values. Rows with a negative slot are not stored."""
        rows = len(slots)
        fresh = cache.new_empty(2, cache.shape[1], rows, cache.shape[3])
        queries = super().rotate_store(qkv, heads, rope, fresh, torch.arange(rows), norms)
        real = slots >= 0
        cache[:, :, slots[real].long()] = fresh[:, :, real]
        return queries

    def attend(self, queries: Tensor, cache: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
        out = torch.zeros_like(queries)
        tables = batch.spans
        for span, (start, stop) in enumerate(pairwise(tables.starts.tolist())):
            prefix = int(tables.prefixes[span])
            pages = tables.pages[span, : -(-(prefix + stop - start) // PAGE_SIZE)].long()
            if start < stop:
                chunk = Chunk(slice(start, stop), prefix, pages, None)
                out[start:stop] = attend_chunk(queries[start:stop], cache, chunk, kind)
        return out
