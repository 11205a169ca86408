"""Tests that every implementation of `Ops` must pass; expected values are computed in float64.

To test a new implementation, subclass `Conformance` and define the fixture `ops`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ranks.rank import exchange_for
from helexa.neuron.engine.step_input_and_graph_sizes import StepBuffers, StepInput
from helexa.neuron.ops.batch import AttentionKind, Batch, Bucket, Capacity, Span
from helexa.neuron.ops.convolution import ConvSizes, ConvWeights
from helexa.neuron.ops.expert_routing_and_mixture import WITHOUT_GATE, BestGroups, Clamp, Expert, ExpertShares, Routing
from helexa.neuron.ops.gated_delta import DeltaRule, DeltaSizes, DeltaWeights
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import NON_FINITE, PAGE_SIZE
from helexa.neuron.ops.linear_and_norm_operators import HeadNorms, QueryTemperature
from helexa.neuron.ops.rank_group_and_shares import SINGLE, RowRange, SharedMemory, Shares
from helexa.neuron.ops.reference.reference_ops import ACTIVATIONS, GATES, RmsNorm
from helexa.neuron.ops.sampling import Adjustments
from helexa.neuron.ops.state_cache import MatrixCache
from helexa.neuron.ops.state_space import ScanSizes, ScanWeights
from helexa.neuron.weights.quantization_formats import QUANT_FORMATS
from helexa.neuron.weights.quantize import quantize
from helexa.neuron.weights.quantized_matrix import Weight
from neuron.ops import float64, paging, random_weights
from neuron.ops.drawn_rows import drawn
from neuron.tensor_memory import tensor_bytes

CAPACITY = Capacity(rows=128, sequences=4, pages_per_sequence=4)
EPS = 1e-5
OFF = (1.0, 0.0)  # top-p and min-p without effect


@dataclass
class History:
    """A sequence in the cache: its pages, and its keys and values so far, each [L, kv_heads, D]."""

    pages: list[int]
    keys: Tensor
    values: Tensor


ATTENTION_KINDS = [AttentionKind(0.125), AttentionKind(0.2, window=40, sinks=torch.linspace(-3, 3, 4), cap=1.5)]
PRODUCTS = list(
    product([("Q4_0",), ("Q8_0", "Q8_0"), ("bfloat16", "bfloat16"), ("Q4_1", "bfloat16")], [None, *GATES]),
)
"""Formats of the matrices, and activation function, of a product."""
FRAMES = list(product([(64, 64), (80, 72), (32, None)], [(64, 65), (1,), (3, 200, 63, 1), (600,)]))
"""Head size and number of its rotated dimensions, and lengths of the frames."""
RECURRENT_STEPS = [
    ([Span(0, 1, 0, 1, 2), Span(1, 10, 0, 9, 0)], None),
    ([Span(0, 1, 9, 1, 0), Span(1, 6, 1, 2, 2)], torch.tensor([5, 0], dtype=torch.int32)),
    ([Span(0, 3, 3, 3, 2), Span(3, 83, 10, 80, 0)], torch.tensor([70, 2, 4], dtype=torch.int32)),
]
"""Spans of the steps of two sequences, and the rows that are returned."""
MIXTURES = list(product(["shares", "normalized", "scores"], [True, False], [None, Clamp(1.702, 0.5)]))
"""Weights of the chosen experts, whether all experts have one format, and limit of the activations."""

_CHOICE = Routing(3, "normalized", "sigmoid", torch.ones(1), BestGroups(4, 2, 2), torch.linspace(0.5, 3, 12))
ROUTINGS = {
    "sigmoid": Routing(3, "shares", "sigmoid"),
    "sigmoid, bias, groups, factors": _CHOICE,
    "softmax, bias": Routing(3, "normalized", "softmax", torch.ones(1)),
    "softmax, groups, factors": replace(
        _CHOICE, weights="shares", scoring="softmax", bias=None, groups=BestGroups(3, 1, 1)
    ),
}
"""Forms of the choice among 12 experts. The test sets the values of a bias."""


class CacheConformance:
    """Tests of the operations on the KV cache.

    Attributes:
        tolerance: Allowed error of a result, relative to the largest expected value.
        cache_tolerance: Allowed error of attention, which reads K and V as the cache rounds them.
    """

    tolerance = 1e-5
    cache_tolerance = 1e-5

    @pytest.fixture(autouse=True)
    def _seeded(self) -> None:
        torch.manual_seed(0)

    @pytest.fixture
    def ops(self) -> Ops:
        raise NotImplementedError

    def near(self, actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        atol = (tolerance or self.tolerance) * largest
        torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)

    @pytest.mark.parametrize("rotated", [64, 32])
    @pytest.mark.parametrize("kind", ATTENTION_KINDS)
    def test_rotate_store_and_attend_match_float64_attention_over_several_steps(
        self, ops: Ops, kind: AttentionKind, rotated: int
    ) -> None:
        """Process two prompts in two chunks each, then single tokens, in one cache."""
        heads, kv_heads, dim = 4, 2, 64
        cache = ops.new_cache(kv_heads, 8, dim)
        norms = HeadNorms(torch.rand(dim) + 0.5, torch.rand(dim) + 0.5, EPS, last=rotated < dim)
        frequencies, none = 100.0 ** -torch.linspace(0, 1, rotated // 2), torch.empty(0, kv_heads, dim)
        sequences = {n: History(pages, none, none) for n, pages in ((1, [5, 2]), (2, [0, 1, 7]))}
        for counts in ({1: 40, 2: 3}, {1: 1, 2: 66}, {1: 1, 2: 1}, {1: 30, 2: 1}):
            plan = [paging.entry(n, len(sequences[n].keys), count, sequences[n].pages) for n, count in counts.items()]
            batch = paging.batch_of(plan, CAPACITY)
            qkv = torch.randn(len(batch.tokens), heads + 2 * kv_heads, dim)

            def forward(batch: Batch, qkv: Tensor = qkv) -> Tensor:
                rope = ops.rope_tables(batch.positions, frequencies)
                queries = ops.rotate_store(qkv.clone(), heads, rope, cache, batch.slots, norms)
                return ops.attend(queries, cache, batch, kind)

            out = ops.run(forward, batch, capture=False)
            angles = batch.positions[:, None].double() * frequencies
            queries, keys = qkv[:, :heads], qkv[:, heads:-kv_heads]
            if norms.last:
                queries = _normalized(_rotated(queries.double(), angles), norms.query)
                keys = _normalized(_rotated(keys.double(), angles), norms.key)
            else:
                queries = _rotated(_normalized(queries, norms.query), angles)
                keys = _rotated(_normalized(keys, norms.key), angles)
            for n, sequence in sequences.items():
                rows = batch.tokens == n
                sequence.keys = torch.cat((sequence.keys, keys[rows]))
                sequence.values = torch.cat((sequence.values, qkv[rows, -kv_heads:]))
                for row in rows.nonzero().flatten().tolist():
                    length = int(batch.positions[row]) + 1
                    expected, _ = float64.attention(
                        queries[row], sequence.keys[:length], sequence.values[:length], kind
                    )
                    self.near(out[row], expected, self.cache_tolerance)

    @pytest.mark.parametrize("window", [None, 40])
    def test_layer_reads_normalized_keys_and_values_of_wide_heads_that_another_layer_stored(
        self, ops: Ops, window: int | None
    ) -> None:
        """Keys before norm and RoPE are also the values. A second layer reads them with queries of its own."""
        heads, kv_heads, dim, rows = 4, 2, 512, 70
        norms = HeadNorms(torch.rand(dim) + 0.5, torch.rand(dim) + 0.5, EPS, values=True)
        frequencies, kind = 100.0 ** -torch.linspace(0, 1, dim // 2), AttentionKind(0.05, window)
        cache = ops.new_cache(kv_heads, 4, dim)
        keys = values = torch.empty(0, kv_heads, dim)
        for prefix, count in ((0, rows - 1), (rows - 1, 1)):
            batch = paging.batch_of([paging.entry(0, prefix, count, [3, 1])], CAPACITY)
            qk, others = torch.randn(count, heads + kv_heads, dim), torch.randn(count, heads, dim)

            def forward(batch: Batch, qk: Tensor = qk, others: Tensor = others) -> Tensor:
                rope = ops.rope_tables(batch.positions, frequencies)
                own = ops.rotate_store(qk.clone(), heads, rope, cache, batch.slots, norms)
                first = ops.attend(own, cache, batch, kind)
                shared = ops.rotate_store(others.clone(), heads, rope, cache, batch.slots, norms)
                return torch.stack((first, ops.attend(shared, cache, batch, kind)))

            out = ops.run(forward, batch, capture=False)
            angles = batch.positions[:, None].double() * frequencies
            keys = torch.cat((keys, _rotated(_normalized(qk[:, heads:], norms.key), angles)))
            values = torch.cat((values, _normalized(qk[:, heads:], torch.ones(dim))))
            for queries, actual in zip((qk[:, :heads], others), out, strict=True):
                queries = _rotated(_normalized(queries, norms.query), angles)
                for row in {0, count // 2, count - 1}:
                    end = prefix + row + 1
                    expected, _ = float64.attention(queries[row], keys[:end], values[:end], kind)
                    self.near(actual[row], expected, self.cache_tolerance)

    @pytest.mark.parametrize("heads", [3, 34])
    def test_attend_uses_keys_as_values_in_a_cache_without_values(self, ops: Ops, heads: int) -> None:
        dim, rotated, kind = 96, 32, AttentionKind(0.2)
        cache, frequencies = ops.new_cache(1, 4, dim, values=False), 100.0 ** -torch.linspace(0, 1, rotated // 2)
        keys = torch.empty(0, 1, dim)
        for prefix, count in ((0, 69), (69, 1), (70, 7)):
            batch = paging.batch_of([paging.entry(0, prefix, count, [3, 1])], CAPACITY)
            qk = torch.randn(count, heads + 1, dim)

            def forward(batch: Batch, qk: Tensor = qk) -> Tensor:
                rope = ops.rope_tables(batch.positions, frequencies)
                queries = ops.rotate_store(qk.clone(), heads, rope, cache, batch.slots)
                return ops.attend(queries, cache, batch, kind)

            out = ops.run(forward, batch, capture=False)
            rotated_heads = _rotated(qk.double(), batch.positions[:, None].double() * frequencies)
            keys = torch.cat((keys, rotated_heads[:, heads:]))
            for row in {0, count // 2, count - 1}:
                end = prefix + row + 1
                expected, _ = float64.attention(rotated_heads[row, :heads], keys[:end], keys[:end], kind)
                self.near(out[row, :, rotated:], expected[:, rotated:], self.cache_tolerance)

    def test_attend_sampled_equals_the_sampled_rows_of_attend(self, ops: Ops) -> None:
        cache = ops.new_cache(2, 8, 64)
        pages = {0: [3, 1], 1: [5], 2: [7, 0], 3: [2]}
        for counts in ({0: 50, 1: 5, 2: 66}, {0: 1, 1: 20, 2: 2, 3: 9}):
            prefixes = {0: 50, 1: 5, 2: 66} if 3 in counts else {}
            plan = [paging.entry(n, prefixes.get(n, 0), count, pages[n]) for n, count in counts.items()]
            batch = paging.batch_of(plan, CAPACITY)
            qkv = torch.randn(len(batch.tokens), 8, 64)

            def forward(batch: Batch, qkv: Tensor = qkv) -> Tensor:
                no_rotation = torch.ones(len(qkv), 32), torch.zeros(len(qkv), 32)
                queries = ops.rotate_store(qkv.clone(), 4, no_rotation, cache, batch.slots)
                rows, kind = batch.sample_rows.long(), AttentionKind(0.125, 40)
                whole, sampled = (
                    ops.attend(queries, cache, batch, kind),
                    ops.attend_sampled(queries[rows], cache, batch, kind),
                )
                return torch.stack((whole[rows], sampled))

            whole, sampled = ops.run(forward, batch, capture=False)
            assert 0 < len(sampled) < len(qkv)
            assert torch.equal(whole, sampled)

    def test_attend_gives_equal_outputs_for_equal_heads(self, ops: Ops) -> None:
        cache, batch = ops.new_cache(1, 4, 64), paging.batch_of([paging.entry(0, 0, 20, [2])], CAPACITY)
        no_rotation = torch.ones(20, 32), torch.zeros(20, 32)
        qkv = torch.randn(20, 3, 64)[:, [0, 0, 1, 2]]

        def forward(batch: Batch) -> Tensor:
            queries = ops.rotate_store(qkv.clone(), 2, no_rotation, cache, batch.slots)
            return ops.attend(queries, cache, batch, AttentionKind(0.125))

        out = ops.run(forward, batch, capture=False)
        assert torch.equal(out[:, 0], out[:, 1])

    def test_causal_attention_layer_ignores_the_attention_ranges_of_images(self, ops: Ops) -> None:
        cache, batch = ops.new_cache(1, 4, 64), paging.batch_of([paging.entry(0, 0, 20, [2])], CAPACITY)
        no_rotation, qkv = (torch.ones(20, 32), torch.zeros(20, 32)), torch.randn(20, 4, 64)

        def forward(batch: Batch, *, causal: bool) -> Tensor:
            queries = ops.rotate_store(qkv.clone(), 2, no_rotation, cache, batch.slots)
            return ops.attend(queries, cache, batch, AttentionKind(0.125, causal=causal)).clone()

        expected = ops.run(partial(forward, causal=False), batch, capture=False)
        image = replace(batch, attention_ends=np.full(20, 20, np.int32))
        assert torch.equal(ops.run(partial(forward, causal=True), image, capture=False), expected)
        if ops.kv_bits == 16:
            assert not torch.equal(ops.run(partial(forward, causal=False), image, capture=False), expected)

    @pytest.mark.parametrize("values", [True, False])
    @pytest.mark.parametrize("kv_heads", [1, 3])
    def test_page_bytes_equal_the_size_of_a_page_in_a_new_cache(self, ops: Ops, kv_heads: int, values: bool) -> None:
        cache = ops.new_cache(kv_heads, 5, 64, values)
        assert cache.nbytes == 5 * ops.page_bytes(kv_heads, 64, values)
        assert ops.page_bytes(kv_heads, 64, values) >= (1 + values) * kv_heads * 64 * PAGE_SIZE * ops.kv_bits // 8
        assert not cache.any()

    def test_new_cache_stores_each_page_in_separate_memory(self, ops: Ops) -> None:
        cache = ops.new_cache(2, 3, 64)
        no_rotation, previous = (torch.ones(64, 32), torch.zeros(64, 32)), cache.clone()
        for page in range(3):
            slots = page * PAGE_SIZE + torch.arange(64, dtype=torch.int32)
            ops.rotate_store(torch.randn(64, 4, 64), 0, no_rotation, cache, slots)
            assert (cache != previous).sum() > 0.9 * cache.numel() / 3 - 64
            previous = cache.clone()


class Conformance(CacheConformance):
    """Tests of all operations; the tests of an operation are named `test_<operation>...`.

    Attributes:
        mixture_rows: Number of rows of mixtures of experts that are computed one after another, at most 7.
    """

    mixture_rows = 7

    @pytest.fixture
    def connected(self, ops: Ops, tmp_path: Path) -> Ops:
        """Kernels that are connected to a group of one rank, which uses the same exchange as larger groups."""
        memory_fd = SharedMemory.create()
        ops.connect(exchange_for(ops, SINGLE, memory_fd, tmp_path / "rendezvous", 10.0))
        os.close(memory_fd)
        return ops

    @pytest.mark.parametrize("operation", sorted(Ops.__abstractmethods__))
    def test_each_operation_is_abstract_defined_and_tested(self, ops: Ops, operation: str) -> None:
        partial = type("Partial", (type(ops),), {operation: getattr(Ops, operation)})
        with pytest.raises(TypeError, match=f"abstract.*{operation}"):
            partial()
        assert operation in vars(type(ops)), "the operation is inherited"
        assert any(name.startswith(f"test_{operation}") for name in dir(Conformance))

    def test_store_of_packed_weights_returns_none_for_a_matrix_that_was_not_saved(
        self, ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache"))
        model = tmp_path / "model"
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"weights")
        assert ops.store(model, "q8_0").get("weight", (32, 64)) is None

    @pytest.mark.parametrize("name", ["Q4_0", "Q6_K", random_weights.PLAIN])
    def test_matrix_embedding_returns_its_exact_rows(self, ops: Ops, name: str) -> None:
        weight = random_weights.make(name, 48, 256)
        rows = ops.embedding(ops.matrix(weight), torch.arange(48, dtype=torch.int32))
        self.near(rows, random_weights.plain(weight))

    @pytest.mark.parametrize("form", ["q8_0", "q4k"])
    def test_matrix_is_quantized_to_the_requested_format(self, ops: Ops, form: str) -> None:
        weight, x = torch.randn(48, 256), torch.randn(3, 256)
        out = ops.linear([ops.matrix(weight, QUANT_FORMATS[form])], None)(x)
        self.near(out, x.double() @ weight.double().T, 0.1)

    @pytest.mark.parametrize("rows", [45, 48])
    @pytest.mark.parametrize("name", random_weights.ALL)
    def test_matrix_bytes_equal_the_size_of_the_packed_matrix(self, ops: Ops, name: str, rows: int) -> None:
        weight = random_weights.make(name, rows, 256)
        assert ops.matrix(weight).nbytes == ops.matrix_bytes(_on_meta(weight))

    @pytest.mark.parametrize("form", QUANT_FORMATS)
    def test_matrix_bytes_equal_the_size_of_a_matrix_quantized_at_load(self, ops: Ops, form: str) -> None:
        weight = torch.randn(48, 256)
        quantized = quantize(_on_meta(weight), QUANT_FORMATS[form])
        assert ops.matrix(weight, QUANT_FORMATS[form]).nbytes == ops.matrix_bytes(quantized)

    @pytest.mark.parametrize(
        "names", [("Q4_1",), ("Q8_0", "Q8_0"), ("bfloat16",), ("bfloat16",) * 3, ("Q6_K", "bfloat16")]
    )
    def test_product_bytes_equal_the_memory_of_a_linear_product(self, ops: Ops, names: tuple[str, ...]) -> None:
        weights = [random_weights.make(name, 48, 256) for name in names]
        product = ops.linear([ops.matrix(weight) for weight in weights], None)
        assert _unshared_bytes(ops, product) == _product_bytes(ops, weights)

    @pytest.mark.parametrize("name", ["Q4_K", "bfloat16"])
    def test_product_bytes_equal_the_memory_of_a_mixture_of_experts(self, ops: Ops, name: str) -> None:
        shapes = (64, 256), (64, 256), (256, 256)
        weights = [[random_weights.make(name, *shape) for shape in shapes] for _ in range(4)]
        experts = [Expert([ops.matrix(gate), ops.matrix(up)], ops.matrix(down)) for gate, up, down in weights]
        mixture = ops.mixture(experts, Routing(2, "shares"))
        gate_ups, downs = [weight for expert in weights for weight in expert[:2]], [expert[2] for expert in weights]
        expected = _product_bytes(ops, gate_ups) + _product_bytes(ops, downs)
        assert _unshared_bytes(ops, mixture) == pytest.approx(
            expected, rel=0.01
        )  # tables of addresses take a little more

    @pytest.mark.parametrize(("names", "gate"), PRODUCTS)
    def test_linear_matches_the_float64_product_with_bias_and_gate(
        self, ops: Ops, names: tuple[str, ...], gate: str | None
    ) -> None:
        weights = [random_weights.make(name, 48, 64) for name in names]
        bias, x = torch.randn(48 * len(names)), torch.randn(5, 128 if gate else 64)
        step_bytes = ops.step_bytes
        out = ops.linear([ops.matrix(weight) for weight in weights], bias, gate)(x.clone())
        assert ops.step_bytes > step_bytes
        first, second = x.double().chunk(2, -1)
        inside = GATES[gate](first) * second if gate else x.double()
        self.near(out, inside @ torch.cat([random_weights.plain(weight) for weight in weights]).T + bias)

    @pytest.mark.parametrize("name", ["Q4_0", random_weights.PLAIN])
    def test_embedding_returns_scaled_rows_of_the_matrix(self, ops: Ops, name: str) -> None:
        weight, tokens = random_weights.make(name, 48, 64), torch.tensor([3, 0, 3, 47], dtype=torch.int32)
        out = ops.embedding(ops.matrix(weight), tokens, 2.5)
        assert out.dtype == torch.float32
        self.near(out, random_weights.plain(weight)[tokens] * 2.5)

    @pytest.mark.parametrize("name", ["Q4_0", random_weights.PLAIN])
    def test_embedding_of_a_token_outside_the_rows_is_zero(self, ops: Ops, name: str) -> None:
        weight, tokens = random_weights.make(name, 48, 64), torch.tensor([100, 99, 147, 148, 0], dtype=torch.int32)
        out = ops.embedding(ops.matrix(weight), tokens, 2.5, RowRange(100, 148, 200))
        self.near(out[[0, 2]], random_weights.plain(weight)[[0, 47]] * 2.5)
        assert not out[[1, 3, 4]].any()

    @pytest.mark.parametrize("gate", GATES)
    def test_gate_mul_matches_its_definition(self, ops: Ops, gate: str) -> None:
        x = torch.randn(5, 128)
        first, second = x.double().chunk(2, -1)
        self.near(ops.gate_mul(x, gate), GATES[gate](first) * second)

    def test_connect_to_a_group_of_one_rank_makes_gather_return_its_input(self, connected: Ops) -> None:
        for rows in (1, 5, 3000):  # 3000 rows exceed the shared memory
            x = torch.randn(rows, 512)
            assert torch.equal(connected.gather(x, Shares.split(512, 1, 0)), x)

    def test_gather_and_sum_ranks_in_a_group_of_one_rank_return_their_input(self, connected: Ops) -> None:
        x = torch.randn(5, 64)
        assert torch.equal(connected.gather(x, Shares.split(64, 1, 0)), x)
        assert torch.equal(connected.sum_ranks(x), x)

    def test_sum_ranks_of_no_rows_is_empty(self, connected: Ops) -> None:
        assert connected.sum_ranks(torch.randn(0, 64)).shape == (0, 64)

    def test_mixture_divided_among_ranks_equals_the_whole_mixture(self, connected: Ops) -> None:
        weights = [random_weights.make("Q8_0", *shape) for shape in ((64, 64), (64, 64), (64, 64)) * 3]
        matrices = [connected.matrix(weight) for weight in weights]
        experts = [Expert(matrices[at : at + 2], matrices[at + 2]) for at in range(0, 9, 3)]
        x, scores = torch.randn(self.mixture_rows, 64), torch.randn(self.mixture_rows, 3)
        shares = ExpertShares(Shares.split(64, 1, 0), Shares.split(64, 1, 0))
        divided = connected.mixture(experts, Routing(2, "shares"), None, shares)(x.clone(), scores)
        self.near(divided, connected.mixture(experts, Routing(2, "shares"))(x.clone(), scores).double())

    def test_rms_norm_adds_the_residual_in_place_and_normalizes(self, ops: Ops) -> None:
        weight, hidden, delta = torch.randn(64), torch.randn(3, 64) * 10, torch.randn(3, 64)
        norm, residual = ops.rms_norm(weight, EPS), hidden.clone()
        self.near(norm(residual, delta), _normalized(hidden + delta, weight))
        assert torch.equal(residual, hidden + delta)
        self.near(norm(residual), _normalized(residual, weight))

    def test_layer_norm_adds_the_residual_in_place_and_normalizes(self, ops: Ops) -> None:
        weight, bias = torch.randn(2, 64)
        hidden, delta = torch.randn(3, 64) * 10 + 5, torch.randn(3, 64)
        norm, residual = ops.layer_norm(weight, bias, EPS), hidden.clone()
        self.near(norm(residual, delta), _layer_normalized(hidden + delta, weight, bias))
        assert torch.equal(residual, hidden + delta)
        self.near(norm(residual), _layer_normalized(residual, weight, bias))

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activate_matches_its_definition_even_for_extreme_values(self, ops: Ops, activation: str) -> None:
        x = torch.randn(5, 128) * 4
        x[0, :5] = torch.tensor([-80.0, 80.0, 0.0, -300.0, 300.0])
        self.near(ops.activate(x.clone(), activation), ACTIVATIONS[activation](x.double()))

    @pytest.mark.parametrize(("size", "lengths"), FRAMES)
    def test_attend_frames_matches_float64_attention_within_each_frame(
        self, ops: Ops, size: tuple[int, int | None], lengths: tuple[int, ...]
    ) -> None:
        (dim, rotated), rows, heads = size, sum(lengths), 3
        qkv = torch.randn(rows, 3 * heads, dim)
        qkv[:, :, rotated or dim :] = 0
        angles = torch.randn(rows, (rotated or 0) // 2) * 10
        rope = (angles.cos(), angles.sin()) if rotated else None
        out = ops.attend_frames(qkv.clone(), rope, lengths, 0.3)
        query, key, value = qkv.split(heads, dim=1)
        query, key = (_rotated(x, angles.double()) for x in (query.double(), key.double()))
        start = 0
        for length in lengths:
            frame = slice(start, start + length)
            scores = torch.einsum("qhd,khd->hqk", query[frame], key[frame]) * 0.3
            expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[frame].double())
            self.near(out[frame], expected, self.cache_tolerance)
            start += length

    def test_rope_tables_match_their_definition(self, ops: Ops) -> None:
        positions = torch.tensor([0, 1, 63, 4095], dtype=torch.int32)
        frequencies = 10000.0 ** -torch.linspace(0, 1, 16)
        angles = (positions[:, None].float() * frequencies).double()
        cos, sin = ops.rope_tables(positions, frequencies, 1.25)
        self.near(cos, angles.cos() * 1.25)
        self.near(sin, angles.sin() * 1.25)

    def test_partials_bytes_of_attention_do_not_shrink_with_more_sequences(self, ops: Ops) -> None:
        assert 0 <= ops.partials_bytes(1, 8, 2, 64) <= ops.partials_bytes(8, 8, 2, 64)

    @pytest.mark.parametrize(("weights", "alike", "clamp"), MIXTURES)
    def test_mixture_matches_the_weighted_sum_of_the_chosen_experts(
        self, ops: Ops, weights: str, alike: bool, clamp: Clamp | None
    ) -> None:
        """Test experts that all have one format, and experts of mixed formats, for which no fused kernel exists."""
        routing = Routing(2, weights)  # type: ignore[arg-type]
        names = ["Q4_0"] * 4 if alike else ["Q4_0", "Q8_0", "Q4_0", "bfloat16"]
        weights_of_expert = [[random_weights.make(name, 64, 64) for _ in range(3)] for name in names]
        experts = [
            Expert([ops.matrix(gate), ops.matrix(up)], ops.matrix(down), torch.randn(128), torch.randn(64))
            for gate, up, down in weights_of_expert
        ]
        x, scores = torch.randn(7, 64) / 8, torch.stack([torch.randperm(4).float() for _ in range(7)])
        out = ops.mixture(experts, routing, clamp)(x.clone(), scores.clone())
        expected = torch.zeros(7, 64, dtype=torch.float64)
        for row, (chosen, shares) in enumerate(zip(*routing(scores), strict=True)):
            for expert, share in zip(chosen.tolist(), shares.tolist(), strict=True):
                gate, up, down = (random_weights.plain(weight) for weight in weights_of_expert[expert])
                biases = experts[expert].gate_up_bias, experts[expert].down_bias
                assert biases[0] is not None
                assert biases[1] is not None
                gate_up = torch.cat((gate, up)) @ x[row].double() + biases[0]
                expected[row] += share * (down @ _activated(gate_up, clamp) + biases[1])
        self.near(out, expected)

    @pytest.mark.parametrize("name", ["Q8_0", random_weights.PLAIN])
    def test_head_linear_multiplies_each_head_by_its_own_matrix(self, ops: Ops, name: str) -> None:
        weights, x = [random_weights.make(name, 48, 64) for _ in range(3)], torch.randn(5, 3, 96)
        step_bytes = ops.step_bytes
        product = ops.head_linear([ops.matrix(weight) for weight in weights])
        assert ops.step_bytes > step_bytes
        for first in (0, 32):
            inputs = x[:, :, first : first + 64].double()
            heads = [inputs[:, head] @ random_weights.plain(weight).T for head, weight in enumerate(weights)]
            self.near(product(x.clone(), first), torch.stack(heads, dim=1))
        assert product(x[:0]).shape == (0, 3, 48)

    @pytest.mark.parametrize("name", ["Q8_0", random_weights.PLAIN])
    def test_head_linear_bytes_equal_memory_of_the_product(self, ops: Ops, name: str) -> None:
        weights = [random_weights.make(name, 48, 64) for _ in range(3)]
        product = ops.head_linear([ops.matrix(weight) for weight in weights])
        expected = ops.head_linear_bytes(weights).resident or sum(ops.matrix_bytes(weight) for weight in weights)
        assert _unshared_bytes(ops, product) == pytest.approx(expected, abs=64)  # the table of addresses

    @pytest.mark.parametrize("interleaved", [True, False])
    def test_join_latent_matches_its_definition(self, ops: Ops, interleaved: bool) -> None:
        queries, absorbed, latent = torch.randn(5, 3, 48), torch.randn(5, 3, 64), torch.randn(5, 80)
        weight = torch.rand(64) + 0.5
        out = ops.join_latent(queries.clone(), absorbed.clone(), latent.clone(), weight, EPS, interleaved)
        order = [*range(0, 16, 2), *range(1, 16, 2)] if interleaved else list(range(16))
        self.near(out[:, :3], torch.cat((queries[:, :, 32:][:, :, order], absorbed), dim=2))
        key = torch.cat((latent[:, 64:][:, order].double(), _normalized(latent[:, :64], weight)), dim=1)
        self.near(out[:, 3], key)

    @pytest.mark.parametrize("form", ROUTINGS)
    def test_mixture_chooses_experts_by_value_bias_and_group(self, ops: Ops, form: str) -> None:
        """The bias and the groups change the choice of most rows, and the weights of no expert."""
        count, x = 12, torch.randn(9, 64) / 8
        routing = replace(ROUTINGS[form], bias=None if ROUTINGS[form].bias is None else torch.linspace(0.4, 0, count))
        weights = [[random_weights.make("Q8_0", 64, 64) for _ in range(3)] for _ in range(count)]
        experts = [Expert([ops.matrix(gate), ops.matrix(up)], ops.matrix(down)) for gate, up, down in weights]
        scores = torch.stack([torch.randperm(count).float() for _ in x]) / 3 - 2
        out, expected = ops.mixture(experts, routing)(x.clone(), scores.clone()), torch.zeros(9, 64).double()
        for row, row_scores in enumerate(scores.double()):
            for expert, share in _routed(row_scores, routing).items():
                gate, up, down = (random_weights.plain(weight) for weight in weights[expert])
                expected[row] += share * (down @ _activated(torch.cat((gate, up)) @ x[row].double(), None))
        self.near(out, expected)

    @pytest.mark.parametrize("form", ["Q8_0", "bfloat16"])
    def test_mixture_of_experts_without_gates_matches_its_definition(self, ops: Ops, form: str) -> None:
        x, scores = torch.randn(7, 64) / 8, torch.stack([torch.randperm(4).float() for _ in range(7)])
        x, scores = x[: self.mixture_rows], scores[: self.mixture_rows]
        routing, weights = Routing(2, "normalized"), [[random_weights.make(form, 64, 64) for _ in "ud"] for _ in "abcd"]
        experts = [Expert([ops.matrix(up)], ops.matrix(down)) for up, down in weights]
        out, expected = ops.mixture(experts, routing, act=WITHOUT_GATE)(x.clone(), scores), torch.zeros_like(x).double()
        for row, (chosen, shares) in enumerate(zip(*routing(scores), strict=True)):
            for expert, share in zip(chosen.tolist(), shares.tolist(), strict=True):
                up, down = (random_weights.plain(weight) for weight in weights[expert])
                expected[row] += share * (down @ (up @ x[row].double()).relu().square())
        self.near(out, expected)

    def test_delta_rule_states_of_two_sequences_are_independent(self, ops: Ops) -> None:
        """A sequence gets equal outputs and states in one step, and in several steps next to another sequence."""
        sizes = DeltaSizes(key_heads=2, heads=4, key_dim=32, value_dim=32, kernel=4)
        weights = DeltaWeights(
            kernel=torch.randn(4, sizes.mixed) / 2,
            rate=torch.rand(4),
            bias=torch.randn(4),
            norm=torch.rand(32),
            eps=EPS,
        )
        rule, widths = ops.delta_rule(sizes, weights), (sizes.mixed, sizes.values, 4, 4)

        first, second = torch.randn(9, sum(widths)), torch.randn(9, sum(widths))
        one_step_cache, several_steps_cache = rule.new_cache(3), rule.new_cache(3)
        batch = paging.batch_of([_in_slot(1, 0, 9, 2)], CAPACITY)

        def apply(rows: Tensor, cache: MatrixCache, batch: Batch, wanted: Tensor | None) -> Tensor:
            return ops.run(lambda batch: rule(*rows.split(widths, -1), cache, batch, wanted), batch, False)

        expected = apply(first, one_step_cache, batch, None)
        outputs: list[Tensor] = []
        for start, end in ((0, 5), (5, 6), (6, 9)):
            plan = [_in_slot(1, start, end - start, 0), _in_slot(2, start, end - start, 1)]
            batch = paging.batch_of(plan, CAPACITY)
            rows = torch.empty(len(batch.tokens), sum(widths))
            rows[batch.tokens == 1], rows[batch.tokens == 2] = first[start:end], second[start:end]
            wanted_rows = (batch.tokens == 1).nonzero().flatten().int()
            outputs.append(apply(rows, several_steps_cache, batch, wanted_rows))
        self.near(torch.cat(outputs), expected, 10 * self.tolerance)
        self.near(several_steps_cache.state[0], one_step_cache.state[2], 10 * self.tolerance)
        assert not torch.equal(several_steps_cache.state[1], one_step_cache.state[2])

    @pytest.mark.parametrize("value_dim", [64, 48])
    def test_delta_rule_equals_plain_torch(self, ops: Ops, value_dim: int) -> None:
        """The second batch has a decode row, a decode row with drafts, and the first rows of a sequence."""
        sizes = DeltaSizes(key_heads=2, heads=4, key_dim=32, value_dim=value_dim, kernel=4)
        weights = DeltaWeights(
            kernel=torch.randn(4, sizes.mixed) / 2,
            rate=torch.rand(4),
            bias=torch.randn(4),
            norm=torch.rand(value_dim),
            eps=EPS,
        )
        plain = DeltaRule(sizes, weights, RmsNorm(weights.norm, EPS, torch.float32), torch.device("cpu"))
        rule, widths = ops.delta_rule(sizes, weights), (sizes.mixed, sizes.values, 4, 4)
        caches = plain.new_cache(4), rule.new_cache(4)
        for memory in (caches[1].conv, caches[1].state):
            memory.fill_(torch.nan)
        prompts = [Span(0, 1, 0, 1, 1), Span(1, 3, 0, 2, 0), Span(3, 21, 0, 18, 2)]
        for spans in (prompts, [Span(0, 1, 18, 1, 2), Span(1, 6, 2, 2, 0), Span(6, 80, 0, 74, 3)]):
            inputs = torch.randn(spans[-1].stop, sum(widths)).split(widths, -1)
            batch = paging.batch_of_spans(spans)
            for wanted in (None, torch.tensor([19, 0, 5], dtype=torch.int32)):
                states = [cache.clone() for cache in caches]
                expected = plain(*inputs, states[0], batch, wanted)
                call = partial(rule, *inputs, states[1], rows=wanted)
                self.near(ops.run(lambda batch, call=call: call(batch=batch), batch, False), expected, 1e-4)
            caches = states[0], states[1]
            for slot in {span.slot for span in spans}:
                self.near(caches[1].state[slot], caches[0].state[slot], 1e-5)

    @pytest.mark.parametrize("biased", [False, True])
    def test_short_convolution_of_sequences_in_several_steps_equals_one_step(self, ops: Ops, biased: bool) -> None:
        """The steps have new and continued sequences, draft tokens and selected rows."""
        width, kernel, bias = 160, torch.randn(4, 160), torch.randn(160) if biased else None
        sizes = ConvSizes(width, 4)
        convolution = ops.short_convolution(sizes, ConvWeights(kernel, bias))
        cache = convolution.new_cache(3)
        cache.conv.fill_(torch.nan)
        assert cache.conv.nbytes == 3 * ops.state_bytes(sizes)
        sequences = {slot: torch.randn(100, 3 * width) for slot in (0, 2)}
        expected = {slot: _convolved(x, kernel, bias) for slot, x in sequences.items()}
        for spans, rows in RECURRENT_STEPS:
            parts = [(span.slot, slice(span.prefix, span.prefix + span.stop - span.start)) for span in spans]
            x = torch.cat([sequences[slot][part] for slot, part in parts])
            call = partial(convolution, x, cache, rows=rows)
            out = ops.run(lambda batch, call=call: call(batch=batch), paging.batch_of_spans(spans), False)
            results = torch.cat([expected[slot][part] for slot, part in parts])
            self.near(out, results if rows is None else results[rows], 1e-5)

    @pytest.mark.parametrize(("groups", "head_dim"), [(2, 48), (1, 16)])
    def test_scan_of_sequences_in_several_steps_equals_one_step(self, ops: Ops, groups: int, head_dim: int) -> None:
        """The steps have new and continued sequences, draft tokens and selected rows."""
        sizes = ScanSizes(heads=4, groups=groups, head_dim=head_dim, state_dim=32, kernel=4)
        convolution = ConvWeights(torch.randn(4, sizes.mixed) / 2, torch.randn(sizes.mixed) if groups > 1 else None)
        weights = ScanWeights(convolution, torch.rand(4), torch.randn(4), torch.randn(4))
        scan, widths = ops.scan(sizes, weights), (sizes.values, sizes.mixed, 4)
        cache = scan.new_cache(3)
        for memory in cache.parts():
            memory.fill_(torch.nan)
        assert sum(memory.nbytes for memory in cache.parts()) == 3 * ops.state_bytes(sizes)
        sequences = {slot: torch.randn(100, sum(widths)) for slot in (0, 2)}
        expected = {slot: _scanned(*x.double().split(widths, -1), sizes, weights) for slot, x in sequences.items()}
        for spans, rows in RECURRENT_STEPS:
            parts = [(span.slot, slice(span.prefix, span.prefix + span.stop - span.start)) for span in spans]
            inputs = torch.cat([sequences[slot][part] for slot, part in parts]).split(widths, -1)
            call = partial(scan, *inputs, cache, rows=rows)
            out = ops.run(lambda batch, call=call: call(batch=batch), paging.batch_of_spans(spans), False)
            results = torch.cat([expected[slot][part] for slot, part in parts])
            self.near(out, results if rows is None else results[rows], 1e-5)

    def test_group_norm_matches_its_definition(self, ops: Ops) -> None:
        x, weight = torch.randn(5, 96), torch.randn(96)
        groups = x.double().view(5, 3, 32)
        scale = (groups.square().mean(-1, keepdim=True) + EPS).rsqrt()
        self.near(ops.group_norm(weight, 3, EPS)(x.clone()), (groups * scale).view(5, 96) * weight)

    def test_attention_outputs_are_multiplied_by_their_gates(self, ops: Ops) -> None:
        gated, kv, x = torch.randn(5, 4, 2, 64), torch.randn(5, 4, 64), torch.randn(5, 4, 64)
        assert torch.equal(ops.join_queries(gated, kv), torch.cat((gated[:, :, 0], kv), 1))
        expected = x.double() * gated[:, :, 1].double().sigmoid()
        self.near(ops.gate_heads(x.clone(), gated), expected)
        self.near(ops.gate_heads(x.clone(), gated[:, :, 1].contiguous()), expected)

    def test_queries_are_scaled_by_their_position(self, ops: Ops) -> None:
        qkv, positions = torch.randn(5, 8, 32), torch.tensor([0, 15, 16, 200, 0], dtype=torch.int32)
        expected, slope, length = qkv.double(), 0.3, 16
        expected[:, :4] *= 1 + slope * (1 + positions // length).double().log()[:, None, None]
        self.near(ops.scale_queries(qkv.clone(), 4, positions, QueryTemperature(slope, length)), expected)

    def test_norm_columns_normalizes_column_ranges_separately(self, ops: Ops) -> None:
        x, weights = torch.randn(5, 256) * 3, (torch.randn(128), torch.randn(64))
        first, second, rest = x.double().split((128, 64, 64), dim=1)
        expected = torch.cat((_normalized(first, weights[0]), _normalized(second, weights[1]), rest), dim=1)
        self.near(ops.norm_columns(x.clone(), weights, EPS), expected)

    def test_without_norm_adds_the_residual_and_does_not_normalize(self, ops: Ops) -> None:
        x, delta = torch.randn(3, 64), torch.randn(3, 64)
        hidden, add = x.clone(), ops.without_norm()
        assert torch.equal(add(hidden), x)
        assert torch.equal(add(hidden, delta), x + delta)
        assert torch.equal(hidden, x + delta)

    def test_state_bytes_equal_the_size_of_one_state_slot(self, ops: Ops) -> None:
        sizes = DeltaSizes(key_heads=2, heads=4, key_dim=32, value_dim=32, kernel=4)
        weights = DeltaWeights(torch.ones(4, sizes.mixed), torch.ones(4), torch.ones(4), torch.ones(32), EPS)
        cache = ops.delta_rule(sizes, weights).new_cache(3)
        assert cache.conv.nbytes + cache.state.nbytes == 3 * ops.state_bytes(sizes)

    def test_add_gated_matches_its_definition(self, ops: Ops) -> None:
        out, x, gate = torch.randn(5, 64), torch.randn(5, 64), torch.linspace(-50, 50, 5)[:, None]
        expected = out.double() + x.double() * gate.double().sigmoid()
        self.near(ops.add_gated(out.clone(), x, gate), expected)

    def test_add_returns_the_elementwise_sum(self, ops: Ops) -> None:
        out, x = torch.randn(2, 5, 64)
        assert torch.equal(ops.add(out.clone(), x), out + x)

    def test_choose_rows_returns_the_requested_rows(self, ops: Ops) -> None:
        x, rows = torch.randn(20, 48), torch.tensor([19, 0, 7, 7], dtype=torch.int32)
        assert torch.equal(ops.choose_rows(x, rows), x[rows])
        assert ops.choose_rows(x, rows[:0]).shape == (0, 48)

    def test_add_scaled_matches_its_definition(self, ops: Ops) -> None:
        x, delta = torch.randn(2, 3, 48)
        expected = (x + delta) * 0.3
        self.near(ops.add_scaled(x, delta, 0.3), expected)
        self.near(x, expected)

    @pytest.mark.parametrize("gate", GATES)
    def test_gate_inputs_reads_only_the_given_columns(self, ops: Ops, gate: str) -> None:
        x, inputs = torch.randn(3, 32), torch.randn(3, 96)
        self.near(ops.gate_inputs(x, inputs, 64, gate), GATES[gate](x) * inputs[:, 64:])

    @pytest.mark.parametrize("width", [48, 41])
    @pytest.mark.parametrize("biased", [False, True])
    def test_soft_cap_bounds_logits_before_the_bias(self, ops: Ops, width: int, biased: bool) -> None:
        logits, bias = torch.randn(3, width) * 50, torch.randn(width) * 100 if biased else None
        expected = 30 * (logits.double() / 30).tanh() + (0 if bias is None else bias)
        self.near(ops.soft_cap(logits.clone(), 30.0, bias), expected)

    @pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
    def test_soft_cap_keeps_non_finite_logits_non_finite(self, ops: Ops, number: float) -> None:
        logits = torch.zeros(2, 20)
        logits[1, [3, 18]] = number
        capped = ops.soft_cap(logits.clone(), 30.0)
        assert torch.equal(capped.isfinite(), logits.isfinite())

    def test_sample_at_temperature_0_takes_the_largest_logit(self, ops: Ops) -> None:
        logits = torch.randn(4, 300)
        logits[1, 7] = logits[1, 9] = 50.0
        logits[2] = torch.nan
        sampling = drawn(*(3 * [(0.0, 0, *OFF, 0.5)]), (1.0, 1, *OFF, 0.99))
        expected = [int(logits[0].argmax()), 7, NON_FINITE, int(logits[3].argmax())]
        assert ops.sample(logits.clone(), sampling).tolist() == expected

    def test_sample_selects_tokens_by_cumulative_probability(self, ops: Ops) -> None:
        logits = torch.tensor([0.2, 0.3, 0.5]).log().repeat(4, 1)
        sampling = drawn((1.0, 0, *OFF, 0.1), (1.0, 0, *OFF, 0.3), (1.0, 0, *OFF, 0.6), (1.0, 2, *OFF, 0.3))
        assert ops.sample(logits, sampling).tolist() == [0, 1, 2, 1]

    def test_largest_random_number_draws_no_unlikely_token(self, ops: Ops) -> None:
        logits, sampling = torch.zeros(1, 3000), drawn((1.0, 0, *OFF, 1 - 2**-53))
        logits[:, 5:], logits[:, 2950] = -torch.inf, -80.0
        assert ops.sample(logits, sampling).tolist() == [4]

    def test_sample_masked_returns_only_tokens_that_the_mask_allows(self, ops: Ops) -> None:
        logits = torch.arange(40.0).flip(0).repeat(3, 1)
        masks = {row: np.packbits(np.isin(np.arange(40), allowed), bitorder="little") for row, allowed in
                 ((2, [5, 9]), (0, [39]))}  # fmt: skip
        sampling = drawn((1.0, 0, *OFF, 0.5), (0.0, 0, *OFF, 0.0), (0.0, 0, *OFF, 0.0), again=True)
        assert ops.sample_masked(logits, masks, sampling) == [5, 39]

    def test_sample_masked_draws_allowed_tokens_in_proportion_to_their_probability(self, ops: Ops) -> None:
        logits = torch.tensor([0.1, 0.2, 0.4, 0.3]).log().repeat(3, 1)
        masks = {row: np.array([0b1011], np.uint8) for row in range(3)}  # allowed: 1/6, 2/6, 3/6
        rows = ((1.0, 0, *OFF, 0.1), (1.0, 0, *OFF, 0.4), (1.0, 0, *OFF, 0.6))
        assert ops.sample_masked(logits, masks, drawn(*rows, again=True)) == [0, 1, 3]

    def test_sample_applies_logit_adjustments_and_restores_the_logits(self, ops: Ops) -> None:
        logits = torch.randn(4, 90).repeat(3, 1)
        adjusted, before = logits.double(), logits.clone()
        cells: list[list[tuple[int, float]]] = [[] for _ in range(36)]
        for row in (1, 2, 7, 11):
            cells[row] = [(row, 2.5), (40, -100.0), (89, 0.5)]
            cells[12 + row] = [(3, 1.7), (row, 1.7), (3, 1.7), (88, 1.7), (-2, 1.7)]
            cells[24 + row] = [(row, 0.3), (5, -1.25)]
            for token, value in cells[row]:
                adjusted[row, token] += value
            for token in {3, row, 88, 60}:
                adjusted[row, token] *= 1.7 if adjusted[row, token] <= 0 else 1 / 1.7
            for token, value in cells[24 + row]:
                adjusted[row, token] -= value
        sampling = drawn(*((float(row % 2), 0, *OFF, row / 12) for row in range(12)), adjustments=_adjustments(cells))
        drawn_again = drawn(*((float(row % 2), 0, *OFF, row / 12) for row in range(12)), again=True)
        plain = drawn(*((float(row % 2), 0, *OFF, row / 12) for row in range(12)))
        last = torch.tensor([7, 60, NON_FINITE])
        masks = {row: np.full(12, 0b01010101, np.uint8) for row in (7, 2)}
        assert ops.sample(logits, sampling, last).tolist() == ops.sample(adjusted.float(), plain).tolist()
        of_masks = ops.sample_masked(adjusted.float(), masks, drawn_again)
        again = msgspec.structs.replace(drawn_again, adjustments=sampling.adjustments)
        assert ops.sample_masked(logits, masks, again, last) == of_masks
        assert torch.equal(logits, before)

    @pytest.mark.parametrize("width", [3, 90, 5000])
    def test_log_probabilities_match_log_softmax(self, ops: Ops, width: int) -> None:
        logits = torch.randn(5, width) * 4
        logits[1, width // 2] = -torch.inf
        logits[2, 1] = torch.nan
        logits[3] = torch.inf
        tokens = torch.tensor([2, width // 2, 1, 0, 0])
        expected = logits.double().log_softmax(-1)
        for rows in (None, np.array([4, 0, 3, 2, 1], np.int32)):
            of_token, ids, values = ops.log_probabilities(logits, tokens, 20, rows)
            places = torch.arange(5) if rows is None else torch.from_numpy(rows).long()
            assert ids.shape == values.shape == (5, min(20, width))
            ordinary = (places != 2) & (places != 3)
            assert of_token[~ordinary].isnan().all()
            assert values[~ordinary].isnan().all()
            places, of_token, ids, values = (entry[ordinary] for entry in (places, of_token, ids, values))
            torch.testing.assert_close(of_token.double(), expected[places, tokens[places]], rtol=0, atol=1e-5)
            likeliest = expected[places].topk(min(20, width)).values
            torch.testing.assert_close(values.double(), likeliest, rtol=0, atol=1e-5)
            torch.testing.assert_close(expected[places].gather(1, ids), likeliest, rtol=0, atol=1e-5)
            assert all(len(set(row)) == min(20, width) for row in ids.tolist())
        assert ops.log_probabilities(logits, tokens, 0)[1].shape == (5, 0)

    def test_run_gives_correct_results_with_and_without_a_captured_graph(self, ops: Ops) -> None:
        """A graph captured for a shape also serves other tokens of the same shape."""
        forward = _Model(ops)
        buffers = StepBuffers(CAPACITY, paging.CPU, ops.fixed_addresses)
        for tokens in ((1, 2), (3, 4), (5, 6, 7), (8, 9), (1, 2)):
            batch = buffers.load(build_step([paging.entry(token, 0, 1, [place]) for place, token in enumerate(tokens)]))
            result = ops.run(forward, batch).clone()
            self.near(result, forward.expected(tokens))
            assert torch.equal(ops.run(forward, batch, capture=False), result)

    def test_capture_replays_a_step_without_calling_python(self, ops: Ops) -> None:
        """Implementations without graph capture raise NotImplementedError."""
        forward, bucket = _Model(ops), Bucket(2, 2)
        buffers = StepBuffers(CAPACITY, paging.CPU, packed=True)
        if not ops.fixed_addresses:
            with pytest.raises(NotImplementedError):
                ops.capture(forward, buffers.load(StepInput.blank(bucket)))
            return
        ops.capture(forward, buffers.load(StepInput.blank(bucket)))
        batch = buffers.load(build_step([paging.entry(token, 0, 1, [token]) for token in (3, 1)], [bucket]))
        assert batch.bucket == bucket
        self.near(ops.run(_fails, batch), forward.expected((3, 1)))

    def test_forget_drops_the_captured_graphs(self, ops: Ops) -> None:
        forward, bucket = _Model(ops), Bucket(2, 2)
        buffers = StepBuffers(CAPACITY, paging.CPU, packed=True)
        if ops.fixed_addresses:
            ops.capture(forward, buffers.load(StepInput.blank(bucket)))
        ops.forget()
        with pytest.raises(AssertionError, match="not captured"):
            ops.run(
                _fails,
                buffers.load(build_step([paging.entry(token, 0, 1, [token]) for token in (3, 1)], [bucket])),
                1,
            )


class _Model:
    """Embedding, norm and output head: [T] tokens -> logits [S, 48]."""

    def __init__(self, ops: Ops) -> None:
        self._weight, self._norm = random_weights.make("Q8_0", 48, 64), torch.rand(64) + 0.5
        self._matrix = ops.matrix(self._weight)
        self._ops, self._head = ops, ops.linear([self._matrix], None)
        self._prepared = ops.rms_norm(self._norm, EPS)

    def __call__(self, batch: Batch) -> Tensor:
        hidden = self._ops.embedding(self._matrix, batch.tokens)
        return self._head(self._prepared(self._ops.choose_rows(hidden, batch.sample_rows)))

    def expected(self, tokens: tuple[int, ...]) -> Tensor:
        weight = random_weights.plain(self._weight)
        return _normalized(weight[list(tokens)], self._norm) @ weight.T


def _fails(batch: Batch) -> Tensor:
    raise AssertionError("not captured")


def _scanned(z: Tensor, mixed: Tensor, steps: Tensor, sizes: ScanSizes, weights: ScanWeights) -> Tensor:
    """Return the result of a Mamba-2 layer for one sequence, in float64, token by token."""
    kernel, bias = weights.convolution.kernel, weights.convolution.bias
    gates = torch.ones_like(mixed)
    convolved = torch.nn.functional.silu(_convolved(torch.cat((gates, gates, mixed), -1), kernel, bias))
    x, b, c = convolved.split((sizes.values, sizes.keys, sizes.keys), -1)
    state = torch.zeros(sizes.heads, sizes.state_dim, sizes.head_dim, dtype=torch.float64)
    out = []
    for token, step in enumerate(torch.nn.functional.softplus(steps + weights.bias)):
        inputs = x[token].view(sizes.heads, 1, -1)
        keys, query = (
            part[token].view(sizes.groups, -1).repeat_interleave(sizes.heads // sizes.groups, 0) for part in (b, c)
        )
        state = (-weights.rate * step).exp()[:, None, None] * state + keys[:, :, None] * inputs * step[:, None, None]
        result = (query[:, :, None] * state).sum(1) + weights.skip[:, None] * inputs[:, 0]
        out.append(result.flatten())
    return torch.stack(out) * torch.nn.functional.silu(z)


def _convolved(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gated convolution of one sequence x [T, 3 * C] in float64."""
    b, c, values = x.double().chunk(3, -1)
    inputs = torch.cat((torch.zeros(len(kernel) - 1, b.shape[1]), b * values))
    total = sum((inputs[tap : tap + len(x)] * row for tap, row in enumerate(kernel)), torch.zeros(()))
    return c * (total if bias is None else total + bias)


def _in_slot(number: int, computed: int, count: int, slot: int) -> paging.PlanEntry:
    entry = paging.entry(number, computed, count, [number])
    entry.sequence.slot = slot
    return entry


def _on_meta(weight: Weight) -> Weight:
    return weight.to("meta") if isinstance(weight, Tensor) else weight.on_meta(weight.shape[0])


def _product_bytes(ops: Ops, weights: Sequence[Weight]) -> int:
    """Return the bytes that `ops` predicts for the product of `weights`, packed matrices included."""
    shapes = [_on_meta(weight) for weight in weights]
    return ops.product_bytes(shapes).resident or sum(ops.matrix_bytes(shape) for shape in shapes)


def _unshared_bytes(ops: Ops, operator: object) -> int:
    """Return the bytes of the tensors that `operator` holds and `ops` does not share."""
    counted: dict[int, object] = {}
    tensor_bytes(vars(ops), counted)
    return tensor_bytes(operator, counted)


def _adjustments(cells: list[list[tuple[int, float]]]) -> Adjustments:
    """Return adjustments given as (token, value) by kind and row."""
    starts = np.cumsum([0, *map(len, cells)]).astype(np.int32)
    tokens, values = zip(*(cell for of_row in cells for cell in of_row), strict=True)
    return Adjustments(starts, np.array(tokens, np.int32), np.array(values, np.float32))


def _normalized(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _layer_normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = x.double()
    deviation = (x.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    return (x - x.mean(-1, keepdim=True)) / deviation * weight.double() + bias.double()


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    half = angles.shape[1]
    first, second, unrotated = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, unrotated), -1)


def _routed(scores: Tensor, routing: Routing) -> dict[int, float]:
    """Return the weight of each expert that a row with these scores uses, in float64."""
    values = (scores.sigmoid() if routing.scoring == "sigmoid" else scores.softmax(0)).tolist()
    bias = [0.0] * len(values) if routing.bias is None else routing.bias.tolist()
    rank = [value + added for value, added in zip(values, bias, strict=True)]
    allowed = range(len(values))
    if routing.groups is not None:
        size, summed = len(values) // routing.groups.count, routing.groups.summed
        of_group = {at: sum(sorted(rank[at : at + size])[-summed:]) for at in range(0, len(values), size)}
        best = sorted(of_group, key=lambda at: of_group[at])[-routing.groups.top_groups :]
        allowed = [expert for at in best for expert in range(at, at + size)]
    chosen = sorted(allowed, key=lambda expert: rank[expert])[-routing.top_k :]
    total = sum(values[expert] for expert in chosen) if routing.weights == "normalized" else 1.0
    factors = [1.0] * len(values) if routing.factors is None else routing.factors.tolist()
    return {expert: values[expert] / total * factors[expert] for expert in chosen}


def _activated(gate_up: Tensor, clamp: Clamp | None) -> Tensor:
    gate, up = gate_up.chunk(2)
    if clamp is None:
        return gate * gate.sigmoid() * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * (clamp.alpha * gate).sigmoid() * (up + 1)
