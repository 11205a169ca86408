"""The batch: a plan laid out as the tensors that a forward pass reads.

Tokens of all sequences lie flat, [T]. Sequences that advance by one token come first; they attend together, in groups
of similar length. Each prefill chunk attends alone, over its prefix and itself.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from helexa.neuron.engine.scheduler import Plan, PlanEntry


@dataclass(frozen=True)
class DecodeGroup:
    """Rows with one query each.

    Attributes:
        rows: where they lie in the flat batch.
        pages: [B, P] page numbers; short rows repeat a page of their own, masked.
        lengths: [B] positions of each row, its own included.
        longest: the largest of them.
        contiguous: first page when B is 1 and its pages ascend without a gap, so that no gather is needed.
    """

    rows: slice
    pages: Tensor
    lengths: Tensor
    longest: int
    contiguous: int | None

    @cached_property
    def mask(self) -> Tensor:
        """[B, longest], additive: 0, or -inf beyond a row's length."""
        beyond = torch.arange(self.longest, device=self.lengths.device) >= self.lengths[:, None]
        return torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, float("-inf"))


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence's prefill: queries at positions `prefix ... prefix + len(rows) - 1`.

    Attributes:
        pages: [P] page numbers of everything computed so far and of the chunk itself.
        contiguous: first page when they ascend without a gap.
    """

    rows: slice
    prefix: int
    pages: Tensor
    contiguous: int | None


@dataclass(frozen=True)
class Batch:
    """One step.

    Attributes:
        tokens: [T] token ids.
        positions: [T] position of each token in its sequence.
        slots: [T] where its K and V go: page * page_size + offset.
        sample_rows: [S] rows whose logits are needed, in plan order.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    decodes: list[DecodeGroup]
    chunks: list[Chunk]


def lay_out(plan: Plan, page_size: int, device: torch.device) -> Batch:
    """Build the batch of a plan."""
    decodes = sorted((e for e in plan if e.count == 1), key=lambda e: len(e.sequence.pages))
    prefills = [e for e in plan if e.count > 1]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_rows: dict[int, int] = {}  # sequence id -> its last row
    chunks: list[Chunk] = []
    for entry in (*decodes, *prefills):
        sequence, start = entry.sequence, len(tokens)
        span = range(sequence.computed, sequence.computed + entry.count)
        tokens += sequence.tokens[span.start : span.stop]
        positions += span
        slots += [sequence.pages[p // page_size] * page_size + p % page_size for p in span]
        if entry.count > 1:
            chunks.append(_chunk(entry, slice(start, len(tokens)), page_size, device))
        last_rows[sequence.id] = len(tokens) - 1
    groups = [_decode_group(group, start, device) for start, group in _by_length(decodes)]
    sample_rows = [last_rows[entry.sequence.id] for entry in plan if entry.samples]
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        sample_rows=torch.tensor(sample_rows, device=device, dtype=torch.long),
        decodes=groups,
        chunks=chunks,
    )


def _chunk(entry: PlanEntry, rows: slice, page_size: int, device: torch.device) -> Chunk:
    prefix = entry.sequence.computed
    pages = entry.sequence.pages[: -(-(prefix + entry.count) // page_size)]
    return Chunk(rows, prefix, torch.tensor(pages, device=device), _first_if_contiguous(pages))


def _by_length(decodes: list[PlanEntry]) -> list[tuple[int, list[PlanEntry]]]:
    """Cut rows sorted by page count into groups in which padding at most doubles the pages read."""
    groups: list[tuple[int, list[PlanEntry]]] = []
    for row, entry in enumerate(decodes):
        if groups and len(entry.sequence.pages) <= 2 * len(groups[-1][1][0].sequence.pages):
            groups[-1][1].append(entry)
        else:
            groups.append((row, [entry]))
    return groups


def _decode_group(group: list[PlanEntry], start: int, device: torch.device) -> DecodeGroup:
    width = max(len(entry.sequence.pages) for entry in group)
    pages = [entry.sequence.pages + entry.sequence.pages[:1] * (width - len(entry.sequence.pages)) for entry in group]
    lengths = [entry.sequence.computed + 1 for entry in group]
    return DecodeGroup(
        rows=slice(start, start + len(group)),
        pages=torch.tensor(pages, device=device),
        lengths=torch.tensor(lengths, device=device),
        longest=max(lengths),
        contiguous=_first_if_contiguous(pages[0]) if len(group) == 1 else None,
    )


def _first_if_contiguous(pages: list[int]) -> int | None:
    return pages[0] if pages[-1] - pages[0] == len(pages) - 1 and pages == sorted(pages) else None
