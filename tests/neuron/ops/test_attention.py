"""Paged attention: near the definition whatever the lengths, and each row the same however it is computed."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.batch import PAGE_SIZE, Capacity
from helexa.neuron.engine.scheduler import PlanEntry
from helexa.neuron.ops.kernel_library import KernelLibrary
from helexa.neuron.ops.native import NativeOps
from neuron.ops import oracle, paged

LENGTHS = [[1], [64], [65], [513], [1030, 3, 64, 511, 512], [5] * 9 + [600]]
CHUNKS = [(0, 1), (0, 70), (1, 70), (63, 2), (64, 64), (100, 130), (500, 30), (1020, 50)]  # prefix and rows
PAGES = 40


class Filled:
    """Sequences of the given lengths in a cache of their own, their pages in no order."""

    def __init__(self, library: KernelLibrary, lengths: list[int], dim: int, bits: int, kv_heads: int = 2) -> None:
        self.library, self.lengths, self.dim, self.bits = library, lengths, dim, bits
        numbers = iter(torch.randperm(PAGES).tolist())
        self.pages = [[next(numbers) for _ in range(-(-length // PAGE_SIZE))] for length in lengths]
        ops = NativeOps(library, 2, bits)
        self.cache = ops.new_cache(kv_heads, PAGES, dim)
        for pages, length in zip(self.pages, lengths, strict=True):
            keys, values = torch.randn(2, length, kv_heads, dim)
            paged.store(ops, self.cache, keys, values, paged.slots_of(pages, length))

    def keys_and_values(self, sequence: int, length: int) -> tuple[Tensor, Tensor]:
        """As attention reads them: in bfloat16."""
        slots = paged.slots_of(self.pages[sequence], length)
        keys, values = paged.unlaid(self.cache, self.dim, self.bits)
        return keys[slots].bfloat16(), values[slots].bfloat16()

    def attend(self, rows: list[tuple[int, int, int]], queries: list[Tensor]) -> list[Tensor]:
        """Results of queries for rows (sequence, prefix, count), each in the order given, all in one batch."""
        plan: list[PlanEntry] = []
        for number, (sequence, prefix, count) in enumerate(rows):
            pages = self.pages[sequence][: -(-(prefix + count) // PAGE_SIZE)]
            plan.append(paged.entry(number, prefix, count, pages))
        batch = paged.batch_of(plan, Capacity(rows=600, sequences=64, pages_per_sequence=PAGES))
        together = torch.empty(len(batch.tokens), *queries[0].shape[1:], dtype=torch.bfloat16)
        for number, own in enumerate(queries):
            together[batch.tokens == number] = own.bfloat16()
        ops = NativeOps(self.library, 2, self.bits)
        group = together.shape[1] // self.cache.shape[1]
        out = ops.run(lambda batch: ops.attend(together, self.cache, batch), batch, group)
        return [out[batch.tokens == number] for number in range(len(rows))]

    def near_the_definition(self, sequence: int, prefix: int, queries: Tensor, out: Tensor) -> None:
        """Weights and values are rounded to bfloat16, sums are of float32."""
        for row in range(len(queries)):
            keys, values = self.keys_and_values(sequence, prefix + row + 1)
            expected, size = oracle.attention(queries[row].bfloat16(), keys, values)
            assert ((out[row] - expected).abs() <= 2.0**-8 * size + 1e-6).all()


@pytest.fixture(params=[16, 8])
def bits(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (1, 32), (6, 128), (7, 64), (8, 96), (2, 256), (32, 64)])
def test_one_query_of_each_sequence(
    library: KernelLibrary, lengths: list[int], group: int, dim: int, bits: int
) -> None:
    filled = Filled(library, lengths, dim, bits)
    queries = [torch.randn(1, 2 * group, dim) for _ in lengths]
    outs = filled.attend([(n, length - 1, 1) for n, length in enumerate(lengths)], queries)
    for n, length in enumerate(lengths):
        filled.near_the_definition(n, length - 1, queries[n], outs[n])


@pytest.mark.parametrize(("prefix", "count"), CHUNKS)
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (7, 32), (1, 128)])
def test_a_chunk_sees_its_prefix_and_itself_up_to_each_row(
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
def test_a_row_comes_out_the_same_alone_in_company_and_within_a_chunk(
    library: KernelLibrary, length: int, group: int, bits: int
) -> None:
    others = [3, 64, 90, 130, 5]
    filled = Filled(library, [length, *others], 64, bits)
    query, prefix = torch.randn(1, 2 * group, 64), length - 1
    (alone,) = filled.attend([(0, prefix, 1)], [query])  # its spans are shared out
    rows = [(0, prefix, 1)] + [(1 + n % 5, others[n % 5] - 1 - n // 5, 1) for n in range(15) if others[n % 5] > n // 5]
    assert len(rows) > 8
    company = filled.attend(rows, [query, *(torch.randn(1, 2 * group, 64) for _ in rows[1:])])  # it does them itself
    assert torch.equal(company[0], alone)
    beside_a_chunk = filled.attend([(0, prefix, 1), (4, 0, 130)], [query, torch.randn(130, 2 * group, 64)])
    assert torch.equal(beside_a_chunk[0], alone)
    for before in {min(prefix, n) for n in (1, 7, 29)} - {0}:
        chunk = torch.cat((torch.randn(before, 2 * group, 64), query))
        (within,) = filled.attend([(0, prefix - before, before + 1)], [chunk])
        assert torch.equal(within[-1:], alone)


def test_rows_of_a_chunk_do_not_depend_on_where_it_is_cut(library: KernelLibrary, bits: int) -> None:
    filled = Filled(library, [600], 64, bits)
    queries = torch.randn(600, 6, 64)
    (whole,) = filled.attend([(0, 0, 600)], [queries])
    for start, end in [(0, 1), (1, 17), (17, 64), (64, 300), (300, 513), (513, 600)]:
        (part,) = filled.attend([(0, start, end - start)], [queries[start:end]])
        assert torch.equal(part, whole[start:end])


def test_keys_that_hardly_differ_share_the_attention(library: KernelLibrary) -> None:
    filled = Filled(library, [700], 64, 16)
    ops = NativeOps(library, 2)
    keys = torch.ones(700, 2, 64)
    keys[350, :, 7] += 2.0**-7  # the next number of bfloat16
    values = torch.randn(700, 2, 64)
    paged.store(ops, filled.cache, keys, values, paged.slots_of(filled.pages[0], 700))
    query = torch.randn(1, 6, 64)
    (out,) = filled.attend([(0, 699, 1)], [query])
    filled.near_the_definition(0, 699, query, out)
    (even,) = filled.attend([(0, 699, 1)], [torch.zeros(1, 6, 64)])
    mean = values.bfloat16().float().mean(0).repeat_interleave(3, 0)
    torch.testing.assert_close(even[0], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [40, 700])
def test_huge_scores_choose_one_position_and_do_not_overflow(library: KernelLibrary, length: int) -> None:
    filled = Filled(library, [length], 64, 16)
    ops = NativeOps(library, 2)
    keys, values = torch.randn(length, 2, 64), torch.randn(length, 2, 64)
    for winner in (0, length // 2, length - 1):
        keys[:] = -1e4
        keys[winner] = 1e4
        paged.store(ops, filled.cache, keys, values, paged.slots_of(filled.pages[0], length))
        (out,) = filled.attend([(0, length - 1, 1)], [torch.full((1, 6, 64), 1e4)])
        assert torch.equal(out[0], values[winner].bfloat16().float().repeat_interleave(3, 0))


def test_a_page_that_was_used_before_does_not_shine_through(library: KernelLibrary, bits: int) -> None:
    """Positions beyond a row's own hold whatever was there, even what no sequence ever wrote."""
    filled = Filled(library, [70], 64, bits)
    query = torch.randn(1, 6, 64)
    (before,) = filled.attend([(0, 66, 1)], [query])
    huge = torch.full((3, 2, 64), 3e38)
    paged.store(NativeOps(library, 2, bits), filled.cache, huge, huge, paged.slots_of(filled.pages[0], 70)[67:])
    (after,) = filled.attend([(0, 66, 1)], [query])
    assert torch.equal(before, after)
