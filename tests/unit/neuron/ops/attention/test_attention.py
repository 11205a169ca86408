"""Paged attention of the native kernels: accuracy for many lengths, and results independent of the batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.ops.batch import AttentionKind, Capacity
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native_ops import NativeOps
from neuron.ops import paging

LENGTHS = [[1], [64], [65], [513], [1030, 3, 64, 511, 512], [5] * 9 + [600]]
CHUNKS = [(0, 1), (0, 70), (1, 70), (63, 2), (64, 64), (100, 130), (500, 30), (1020, 50)]  # prefix and rows
PAGES = 40


class Filled:
    """Sequences of the given lengths in a cache, on shuffled pages."""

    def __init__(self, library: KernelLibrary, lengths: list[int], dim: int, bits: int, kv_heads: int = 2) -> None:
        self.kernels, self.lengths, self.dim, self.bits = library, lengths, dim, bits
        numbers = iter(torch.randperm(PAGES).tolist())
        self.pages = [[next(numbers) for _ in range(-(-length // PAGE_SIZE))] for length in lengths]
        ops = NativeOps(library, 2, bits)
        self.cache = ops.new_cache(kv_heads, PAGES, dim)
        for pages, length in zip(self.pages, lengths, strict=True):
            keys, values = torch.randn(2, length, kv_heads, dim)
            paging.store(ops, self.cache, keys, values, paging.slots_of(pages, length))

    def attend(
        self, rows: list[tuple[int, int, int]], queries: list[Tensor], kind: AttentionKind | None = None
    ) -> list[Tensor]:
        """Run one batch of rows (sequence, prefix, count); return the results in the order of `rows`."""
        kind = kind or AttentionKind(self.dim**-0.5)
        plan: list[PlanEntry] = []
        for number, (sequence, prefix, count) in enumerate(rows):
            pages = self.pages[sequence][: -(-(prefix + count) // PAGE_SIZE)]
            plan.append(paging.entry(number, prefix, count, pages))
        batch = paging.batch_of(plan, Capacity(rows=600, sequences=64, pages_per_sequence=PAGES))
        together = torch.empty(len(batch.tokens), *queries[0].shape[1:])
        for number, query in enumerate(queries):
            together[batch.tokens == number] = query
        together = paging.queries_for(together, self.bits)
        ops = NativeOps(self.kernels, 2, self.bits)
        out = ops.run(lambda batch: ops.attend(together, self.cache, batch, kind), batch)
        return [out[batch.tokens == number] for number in range(len(rows))]

    def near_the_definition(
        self, sequence: int, prefix: int, queries: Tensor, out: Tensor, kind: AttentionKind | None = None
    ) -> None:
        """Assert that `out` is correct within the rounding of weights and values, and of float32 sums.

        The weights of an 8-bit cache are bytes. Errors of the 64 weights of a page have random signs.
        """
        for row in range(len(queries)):
            expected, size = paging.attention(
                queries[row], self.cache, paging.slots_of(self.pages[sequence], prefix + row + 1), self.bits, kind
            )
            rounding = 0.01 * size.max() if self.bits == 8 else 0.0
            assert ((out[row] - expected).abs() <= 2.0**-8 * size + rounding + 1e-6).all()


@pytest.fixture(params=[16, 8])
def bits(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (1, 32), (6, 128), (7, 64), (8, 96), (2, 256), (8, 512), (32, 64)])
def test_attention_of_one_query_per_sequence_matches_the_definition(
    library: KernelLibrary, lengths: list[int], group: int, dim: int, bits: int
) -> None:
    filled = Filled(library, lengths, dim, bits)
    queries = [torch.randn(1, 2 * group, dim) for _ in lengths]
    outs = filled.attend([(n, length - 1, 1) for n, length in enumerate(lengths)], queries)
    for n, length in enumerate(lengths):
        filled.near_the_definition(n, length - 1, queries[n], outs[n])


@pytest.mark.parametrize(("prefix", "count"), CHUNKS)
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (7, 32), (1, 128)])
def test_attention_of_chunk_rows_matches_the_definition(
    library: KernelLibrary, prefix: int, count: int, group: int, dim: int, bits: int
) -> None:
    filled = Filled(library, [prefix + count], dim, bits)
    queries = torch.randn(count, 2 * group, dim)
    (out,) = filled.attend([(0, prefix, count)], [queries])
    chosen = sorted({0, 1, count // 2, count - 1} & set(range(count)))
    for row in chosen:
        filled.near_the_definition(0, prefix + row, queries[row : row + 1], out[row : row + 1])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 511, 512, 513, 1025, 1300])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_attention_row_is_bit_identical_alone_in_a_batch_and_within_a_chunk(
    library: KernelLibrary, length: int, group: int, bits: int
) -> None:
    other_lengths = [3, 64, 90, 130, 5]
    filled = Filled(library, [length, *other_lengths], 64, bits)
    query, prefix = torch.randn(1, 2 * group, 64), length - 1
    (alone,) = filled.attend([(0, prefix, 1)], [query])  # its segments are shared among threads
    rows = [(0, prefix, 1)] + [
        (1 + n % 5, other_lengths[n % 5] - 1 - n // 5, 1) for n in range(15) if other_lengths[n % 5] > n // 5
    ]
    assert len(rows) > 8
    batched = filled.attend(
        rows, [query, *(torch.randn(1, 2 * group, 64) for _ in rows[1:])]
    )  # one thread computes the whole row
    assert torch.equal(batched[0], alone)
    beside_a_chunk = filled.attend([(0, prefix, 1), (4, 0, 130)], [query, torch.randn(130, 2 * group, 64)])
    assert torch.equal(beside_a_chunk[0], alone)
    for earlier in {min(prefix, n) for n in (1, 7, 29)} - {0}:
        chunk = torch.cat((torch.randn(earlier, 2 * group, 64), query))
        (within,) = filled.attend([(0, prefix - earlier, earlier + 1)], [chunk])
        assert torch.equal(within[-1:], alone)


def test_attention_rows_do_not_depend_on_chunk_boundaries(library: KernelLibrary, bits: int) -> None:
    filled = Filled(library, [600], 64, bits)
    queries = torch.randn(600, 6, 64)
    (unsplit,) = filled.attend([(0, 0, 600)], [queries])
    for start, end in [(0, 1), (1, 17), (17, 64), (64, 300), (300, 513), (513, 600)]:
        (chunk,) = filled.attend([(0, start, end - start)], [queries[start:end]])
        assert torch.equal(chunk, unsplit[start:end])


def test_attention_over_nearly_equal_keys_is_the_mean_of_the_values(library: KernelLibrary) -> None:
    filled = Filled(library, [700], 64, 16)
    ops = NativeOps(library, 2)
    keys = torch.ones(700, 2, 64)
    keys[350, :, 7] += 2.0**-7  # the next larger bfloat16
    values = torch.randn(700, 2, 64)
    paging.store(ops, filled.cache, keys, values, paging.slots_of(filled.pages[0], 700))
    query = torch.randn(1, 6, 64)
    (out,) = filled.attend([(0, 699, 1)], [query])
    filled.near_the_definition(0, 699, query, out)
    (even,) = filled.attend([(0, 699, 1)], [torch.zeros(1, 6, 64)])
    mean = values.bfloat16().float().mean(0).repeat_interleave(3, 0)
    torch.testing.assert_close(even[0], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [40, 700])
def test_huge_attention_scores_select_one_position_without_overflow(library: KernelLibrary, length: int) -> None:
    filled = Filled(library, [length], 64, 16)
    ops = NativeOps(library, 2)
    keys, values = torch.randn(length, 2, 64), torch.randn(length, 2, 64)
    for winner in (0, length // 2, length - 1):
        keys[:] = -1e4
        keys[winner] = 1e4
        paging.store(ops, filled.cache, keys, values, paging.slots_of(filled.pages[0], length))
        (out,) = filled.attend([(0, length - 1, 1)], [torch.full((1, 6, 64), 1e4)])
        assert torch.equal(out[0], values[winner].bfloat16().float().repeat_interleave(3, 0))


def test_stale_contents_of_reused_kv_pages_do_not_affect_attention(library: KernelLibrary, bits: int) -> None:
    """Slots beyond a row's position hold arbitrary old bytes, even bytes that no sequence wrote."""
    filled = Filled(library, [70], 64, bits)
    query = torch.randn(1, 6, 64)
    (expected,) = filled.attend([(0, 66, 1)], [query])
    huge = torch.full((3, 2, 64), 3e38)
    paging.store(NativeOps(library, 2, bits), filled.cache, huge, huge, paging.slots_of(filled.pages[0], 70)[67:])
    (actual,) = filled.attend([(0, 66, 1)], [query])
    assert torch.equal(expected, actual)


def kind_of(heads: int, scale: float, window: int | None, sunk: bool, cap: float | None = None) -> AttentionKind:
    return AttentionKind(scale, window, torch.linspace(-4, 6, heads) if sunk else None, cap)


KINDS = [
    (0.125, 1, False),
    (0.125, 64, False),
    (0.3, 100, True),
    (0.1, 513, False, 1.5),
    (0.05, 5000, False),
    (0.2, None, True),
]


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (1, 512), (8, 64)])
def test_attention_with_window_sinks_or_cap_matches_the_definition(
    library: KernelLibrary, settings: tuple[Any, ...], group: int, dim: int, bits: int
) -> None:
    lengths = [1300, 1, 64, 101, 700, 3]
    filled, kind = Filled(library, lengths, dim, bits), kind_of(2 * group, *settings)
    rows = [(1, 0, 1), (2, 63, 1), (3, 100, 1), (0, 1299, 1), (4, 500, 200), (5, 0, 3)]
    queries = [torch.randn(count, 2 * group, dim) for _, _, count in rows]
    for (sequence, prefix, count), query, out in zip(rows, queries, filled.attend(rows, queries, kind), strict=True):
        for row in sorted({0, count // 3, count - 1}):
            filled.near_the_definition(sequence, prefix + row, query[row : row + 1], out[row : row + 1], kind)


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("group", [1, 3, 7])
def test_attention_row_with_window_sinks_or_cap_does_not_depend_on_the_batch(
    library: KernelLibrary, settings: tuple[Any, ...], group: int, bits: int
) -> None:
    filled, kind = Filled(library, [1200, 70], 64, bits), kind_of(2 * group, *settings)
    queries = torch.randn(400, 2 * group, 64)
    (unsplit,) = filled.attend([(0, 800, 400)], [queries], kind)
    for start, end in [(0, 1), (1, 17), (17, 64), (64, 290), (290, 291), (291, 400)]:
        (chunk,) = filled.attend([(0, 800 + start, end - start)], [queries[start:end]], kind)
        assert torch.equal(chunk, unsplit[start:end])
    rows = [(0, 1199, 1)] + [(1, 60 + n, 1) for n in range(9)]  # with this many rows, no row is split among threads
    batched = filled.attend(rows, [queries[-1:], *(torch.randn(1, 2 * group, 64) for _ in range(9))], kind)
    assert torch.equal(batched[0], unsplit[-1:])


@pytest.mark.parametrize("count", [1, 30])
def test_kv_pages_before_the_attention_window_are_not_read(library: KernelLibrary, count: int, bits: int) -> None:
    filled, kind = Filled(library, [1300], 64, bits), AttentionKind(0.125, window=200)
    queries = torch.randn(count, 6, 64)
    (expected,) = filled.attend([(0, 1300 - count, count)], [queries], kind)
    first = (1300 - count + 1 - 200) // PAGE_SIZE
    filled.cache[filled.pages[0][:first]] = 255  # NaN
    (actual,) = filled.attend([(0, 1300 - count, count)], [queries], kind)
    assert torch.equal(expected, actual)
    filled.cache[filled.pages[0][first]] = 255
    (within,) = filled.attend([(0, 1300 - count, count)], [queries], kind)
    assert not torch.equal(expected, within)


def test_extreme_attention_sinks_do_not_overflow(library: KernelLibrary) -> None:
    """A sink above all scores takes all the weight, and a sink below all scores takes none."""
    filled = Filled(library, [600], 64, 16)
    query = torch.randn(1, 6, 64)
    sinks = torch.tensor([-torch.inf, -1e30, -1e4, 1e4, 1e30, 50.0])
    (alone,) = filled.attend([(0, 599, 1)], [query])
    (with_sinks,) = filled.attend([(0, 599, 1)], [query], AttentionKind(0.125, sinks=sinks))
    torch.testing.assert_close(with_sinks[0, :3], alone[0, :3], rtol=1e-6, atol=1e-30)
    assert (with_sinks[0, 3:].abs() < 1e-12).all()
    assert with_sinks.isfinite().all()
