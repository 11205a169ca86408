"""Attention over the paged cache: accuracy for spans of any length, and rows independent of the batch."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helexa.neuron.ops.batch import AttentionKind, Batch, Bucket, Capacity
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.triton import attention
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties
from neuron.ops import float64, paging
from neuron.ops.paging import CPU
from neuron.ops.triton.compile_for_cards import CARDS

PAGES = 72
Span = tuple[int, int]  # prefix and rows
ROUNDING = {torch.float16: 2.0**-9, torch.float32: 2.0**-18}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Filled:
    """Sequences in a cache, on shuffled pages. Unused slots are NaN."""

    def __init__(
        self, spans: Sequence[Span], kv_heads: int, group: int, dim: int, dtype: torch.dtype = torch.float16
    ) -> None:
        self.ops, self.spans = GpuOps(CPU, dtype), spans
        numbers = iter(torch.randperm(PAGES).tolist())
        self.pages = [[next(numbers) for _ in range(-(-sum(span) // PAGE_SIZE))] for span in spans]
        self.cache = self.ops.new_cache(kv_heads, PAGES, dim).fill_(float("nan"))
        for pages, span in zip(self.pages, spans, strict=True):
            self.cache[:, :, paging.slots_of(pages, sum(span))] = torch.randn(2, kv_heads, sum(span), dim).to(dtype)
        self.queries = [torch.randn(rows, kv_heads * group, dim).to(dtype) for _, rows in spans]

    def batch(self, chosen: Sequence[int]) -> Batch:
        plan = [paging.entry(n, *self.spans[n], self.pages[n]) for n in chosen]
        return paging.batch_of(plan, Capacity(rows=600, sequences=64, pages_per_sequence=PAGES))

    def attend(self, kind: AttentionKind, chosen: Sequence[int] | None = None) -> dict[int, Tensor]:
        """Return the results of the chosen sequences (default: all), computed in one batch."""
        chosen = range(len(self.spans)) if chosen is None else chosen
        batch = self.batch(chosen)
        together = torch.empty(len(batch.tokens), *self.queries[0].shape[1:], dtype=self.ops.dtype)
        for n in chosen:
            together[batch.tokens == n] = self.queries[n]
        out = self.ops.attend(together, self.cache, batch, kind)
        return {n: out[batch.tokens == n] for n in chosen}

    def near_the_definition(self, n: int, out: Tensor, kind: AttentionKind, rows: Sequence[int] | None = None) -> None:
        prefix, count = self.spans[n]
        keys, values = self.cache[:, :, paging.slots_of(self.pages[n], prefix + count)].transpose(1, 2)
        for row in range(count) if rows is None else rows:
            length = prefix + row + 1
            expected, size = float64.attention(self.queries[n][row], keys[:length], values[:length], kind)
            assert ((out[row] - expected).abs() <= ROUNDING[self.ops.dtype] * (size + 0.1)).all()


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "dtype"),
    [
        (2, 3, 64, torch.float16),
        (1, 5, 80, torch.float32),
        (1, 1, 96, torch.float16),
        (1, 20, 24, torch.float16),
        (1, 6, 256, torch.float16),
    ],
)
def test_triton_attention_of_one_query_per_sequence_matches_the_definition(
    kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    filled = Filled([(length - 1, 1) for length in (1, 63, 64, 65, 257)], kv_heads, group, dim, dtype)
    kind = AttentionKind(dim**-0.5)
    for n, out in filled.attend(kind).items():
        filled.near_the_definition(n, out, kind)


@pytest.mark.parametrize(
    ("group", "dim", "window", "sinks", "cap"),
    [(3, 64, None, False, None), (8, 80, 40, True, None), (5, 32, 64, False, 1.5)],
)
def test_attention_of_chunks_drafts_and_single_queries_in_one_batch_matches_the_definition(
    group: int, dim: int, window: int | None, sinks: bool, cap: float | None
) -> None:
    spans = [(70, 1), (126, 5), (0, 70), (63, 33), (320, 1)]
    filled = Filled(spans, 1, group, dim)
    kind = AttentionKind(dim**-0.5, window, torch.randn(group) if sinks else None, cap)
    for n, out in filled.attend(kind).items():
        filled.near_the_definition(n, out, kind, sorted({0, 1, 4, 31, 32, spans[n][1] - 1} & set(range(spans[n][1]))))


@pytest.mark.parametrize("window", [None, 70])
def test_draft_tokens_attend_to_earlier_draft_tokens_of_the_sequence(window: int | None) -> None:
    spans = [(299, 1), (240, 17), (254, 4)]
    filled = Filled(spans, 1, 3, 32)
    kind = AttentionKind(32**-0.5, window, torch.randn(3))
    for n, out in filled.attend(kind).items():
        filled.near_the_definition(n, out, kind)


def test_attention_of_a_long_sequence_with_longer_segments_matches_the_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_SHARES", 8)
    assert attention.segments(kv_heads=1) == 8
    filled = Filled([(8 * 256 + 40, 1)], 1, 2, 16, torch.float32)
    for kind in (AttentionKind(0.25), AttentionKind(0.25, window=600)):
        filled.near_the_definition(0, filled.attend(kind)[0], kind)


def test_attention_row_does_not_depend_on_the_batch() -> None:
    spans = [(530, 1), (260, 3), *((length, 1) for length in range(20, 24))]
    filled = Filled(spans, 1, 3, 32)
    kind = AttentionKind(32**-0.5)
    together = filled.attend(kind)
    for n in (0, 1):
        alone = filled.attend(kind, [n])[n]  # its segments are shared among programs
        assert torch.equal(alone, together[n])
    beside_a_chunk = Filled([(270, 1), (0, 30)], 1, 3, 32)
    assert torch.equal(beside_a_chunk.attend(kind)[0], beside_a_chunk.attend(kind, [0])[0])


def test_attention_rows_do_not_depend_on_chunk_boundaries() -> None:
    unsplit = Filled([(0, 150)], 1, 3, 32)
    kind = AttentionKind(32**-0.5)
    expected = unsplit.attend(kind)[0]
    for start, end in [(0, 60), (60, 78), (78, 150)]:
        chunk = Filled([(start, end - start)], 1, 3, 32)
        chunk.cache, chunk.pages, chunk.queries = unsplit.cache, unsplit.pages, [unsplit.queries[0][start:end]]
        assert torch.equal(chunk.attend(kind)[0], expected[start:end])


def test_huge_and_non_finite_attention_scores_affect_only_their_rows() -> None:
    filled = Filled([(80, 1), (80, 1), (0, 40)], 1, 2, 32)
    filled.cache[0, :, paging.slots_of(filled.pages[0], 81)] = -1e3
    filled.cache[0, :, paging.slots_of(filled.pages[0], 81)[50]] = 1e3
    filled.queries[0].fill_(1e3)
    filled.queries[1][0, 1] = float("nan")
    filled.queries[2][7] = float("nan")
    outs = filled.attend(AttentionKind(1.0))
    assert torch.equal(outs[0][0], filled.cache[1, :, paging.slots_of(filled.pages[0], 81)[50]].expand(2, 32))
    assert outs[1][0, 0].isfinite().all()
    assert outs[1][0, 1].isnan().all()
    assert outs[2][7].isnan().all()
    assert outs[2][[*range(7), *range(8, 40)]].isfinite().all()


def test_padding_spans_do_not_change_the_attention_of_other_sequences() -> None:
    filled = Filled([(80, 1), (20, 1)], 1, 2, 32)
    kind = AttentionKind(32**-0.5)
    expected = filled.attend(kind)
    batch = filled.batch([0, 1])
    spans = replace(
        batch.spans,
        pages=torch.nn.functional.pad(batch.spans.pages, (0, 3, 0, 2)),
        starts=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        prefixes=torch.nn.functional.pad(batch.spans.prefixes, (0, 2), value=77),
    )
    padded = replace(batch, device_spans=spans, singles=4)
    queries = torch.cat((filled.queries[1], filled.queries[0], torch.full((2, 2, 32), float("nan"), dtype=torch.half)))
    out = attention.attend(queries, filled.cache, padded, kind, filled.ops.gpu)  # spans of one row first
    assert torch.equal(out[:2], torch.cat((expected[1], expected[0])))


@pytest.mark.parametrize(("dim", "gpu"), [(544, None), (32, CARDS["sm_75"])])
def test_attention_uses_torch_for_unsupported_head_sizes_and_gpus(dim: int, gpu: GpuProperties | None) -> None:
    filled = Filled([(70, 1), (3, 18)], 1, 2, dim, torch.float32)
    kind, batch, queries = AttentionKind(dim**-0.5), filled.batch([0, 1]), torch.randn(19, 2, dim)
    cache = filled.cache.nan_to_num()
    ops = GpuOps(CPU, torch.float32, 8, gpu)
    expected = ReferenceOps(CPU, torch.float32).attend(queries, cache, batch, kind)
    assert torch.equal(ops.attend(queries, cache, batch, kind), expected)
    assert ops.new_cache(1, 2, dim).dtype == torch.float32, "torch's attention cannot read bytes"


def test_steps_with_unsupported_head_sizes_are_not_captured_as_graphs() -> None:
    filled = Filled([(3, 1)], 1, 2, 544)
    with pytest.raises(RuntimeError, match="heads of 544"):
        filled.ops.attend(
            filled.queries[0], filled.cache, replace(filled.batch([0]), bucket=Bucket(1, 1)), AttentionKind(1.0)
        )
