"""One forward pass through layers with different numbers of heads, KV heads and head sizes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.step_input_and_graph_sizes import StepBuffers
from helexa.neuron.ops.batch import AttentionKind, Batch, Capacity
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from neuron.ops import paging

VOCABULARY, HIDDEN = 64, 128
SHAPES = [(2, 2, 32), (16, 2, 128), (12, 4, 64)]  # heads, KV heads, head size; smallest first
LENGTHS = [1050, 1100, 1300, 1536, 1537, 1600, 1750, 1790]  # three or four segments each
WIDTH = 28
CAPACITY = Capacity(rows=64, sequences=len(LENGTHS), pages_per_sequence=WIDTH)
PAGES = [list(range(number * WIDTH, (number + 1) * WIDTH)) for number in range(len(LENGTHS))]


class Model:
    """Attention layers over filled caches; every instance has the same weights and cache contents."""

    def __init__(self, ops: Ops) -> None:
        torch.manual_seed(1)
        self.ops = ops
        self.embed = ops.matrix(torch.randn(VOCABULARY, HIDDEN).bfloat16())
        self.norm = ops.rms_norm(torch.ones(HIDDEN), 1e-5)
        self.qkv = [self.linear((heads + 2 * kv_heads) * dim, HIDDEN) for heads, kv_heads, dim in SHAPES]
        self.out = [self.linear(HIDDEN, heads * dim) for heads, _, dim in SHAPES]
        self.caches = [self.filled(kv_heads, dim) for _, kv_heads, dim in SHAPES]

    def linear(self, outputs: int, columns: int) -> LinearOp:
        return self.ops.linear([self.ops.matrix((torch.randn(outputs, columns) * 2 / columns**0.5).bfloat16())], None)

    def filled(self, kv_heads: int, dim: int) -> Tensor:
        cache = self.ops.new_cache(kv_heads, WIDTH * len(LENGTHS), dim)
        for pages, length in zip(PAGES, LENGTHS, strict=True):
            no_rotation = torch.ones(length, dim // 2), torch.zeros(length, dim // 2)
            keys_and_values = torch.randn(length, 2 * kv_heads, dim).bfloat16().float()
            self.ops.rotate_store(keys_and_values, 0, no_rotation, cache, paging.slots_of(pages, length))
        return cache

    def forward(self, batch: Batch) -> Tensor:
        ops, rows = self.ops, len(batch.tokens)
        hidden, delta = ops.embedding(self.embed, batch.tokens), None
        for (heads, kv_heads, dim), qkv, out, cache in zip(SHAPES, self.qkv, self.out, self.caches, strict=True):
            rope = ops.rope_tables(batch.positions, 100.0 ** -torch.linspace(0, 1, dim // 2))
            projected = qkv(self.norm(hidden, delta)).view(rows, heads + 2 * kv_heads, dim)
            queries = ops.rotate_store(projected, heads, rope, cache, batch.slots)
            delta = out(ops.attend(queries, cache, batch, AttentionKind(dim**-0.5)).view(rows, heads * dim))
        return self.norm(hidden, delta)


@pytest.mark.parametrize("counts", [[1] * 8, [1] * 7 + [20], [30, 1, 1]])
@torch.inference_mode()
def test_captured_graph_over_layers_of_several_head_shapes_matches_the_reference(
    library: KernelLibrary, counts: Sequence[int]
) -> None:
    """Steps are at different positions; later steps replay the graph of the first step."""
    native, reference = NativeOps(library, 2), ReferenceOps(paging.CPU, torch.float32)
    ours, oracle, calls = Model(native), Model(reference), 0
    buffers = StepBuffers(CAPACITY, paging.CPU, packed=False)

    def forward(batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return ours.forward(batch)

    captured_calls = 0
    for step in range(3):
        plan = [
            paging.entry(10 * step + number, LENGTHS[number] - 70 + 20 * step, count, PAGES[number])
            for number, count in enumerate(counts)
        ]
        batch = buffers.load(build_step(plan))
        result = native.run(forward, batch).clone()
        expected = reference.run(oracle.forward, batch)
        assert ((result - expected).norm(dim=1) <= 0.03 * expected.norm(dim=1)).all()
        captured_calls = captured_calls or calls
    assert native._graphs.complete
    assert calls == captured_calls, "later steps were not replayed"
