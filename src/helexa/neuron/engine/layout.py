"""Lays a plan out as the batch that a forward pass reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from helexa.neuron.engine.plan import Plan
from helexa.neuron.ops.batch import Batch, Capacity, Span
from helexa.neuron.ops.constants import PAGE_SIZE


@dataclass(frozen=True)
class Rows:
    """A plan laid out in lists; see `Batch`."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    sample_rows: list[int]
    pooled: int
    spans: list[Span]

    @classmethod
    def of(cls, plan: Plan) -> "Rows":
        """The rows of a plan, sequences that advance by one token first."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        samples: dict[int, range] = {}  # sequence id -> the rows whose logits it needs
        pooled: dict[int, list[int]] = {}  # the same for the rows that are pooled or scored
        for entry in sorted(plan, key=lambda e: (e.count + len(e.drafts) > 1, len(e.sequence.pages))):
            sequence, drafts, start = entry.sequence, entry.drafts, len(tokens)
            computed = sequence.computed
            end = computed + entry.count + len(drafts)
            pages = sequence.pages[: -(-end // PAGE_SIZE)]
            if end - computed == 1:  # by far the most are such
                tokens.append(sequence.tokens[computed])
                positions.append(computed)
                slots.append(pages[-1] * PAGE_SIZE + computed % PAGE_SIZE)
            else:
                tokens += sequence.tokens[computed : end - len(drafts)]
                tokens += drafts
                positions += range(computed, end)
                slots += [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(computed, end)]
            spans.append(Span(slice(start, len(tokens)), computed, pages, sequence.slot or 0, entry.count))
            samples[sequence.request.id] = range(len(tokens) - len(drafts) - 1, len(tokens))
            if wanted := sequence.wanted(computed, computed + entry.count):
                pooled[sequence.id] = [start + place - computed for place in wanted]
        sample_rows = [row for entry in plan if entry.samples for row in samples[entry.sequence.request.id]]
        pooled_rows = [row for entry in plan for row in pooled.get(entry.sequence.id, ())] if pooled else []
        return cls(tokens, positions, slots, sample_rows + pooled_rows, len(pooled_rows), spans)


class Layout:
    """Lays plans out in buffers that stay where they are, as recorded steps need it."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self._capacity = capacity
        self._tokens, self._positions, self._slots, self._sample_rows = (
            torch.zeros(capacity.rows, dtype=torch.int32, device=device) for _ in range(4)
        )

    def lay_out(self, plan: Plan) -> Batch:
        """The batch of a plan; it is good until the next one is laid out."""
        rows = Rows.of(plan)
        return Batch(
            tokens=_fill(self._tokens, rows.tokens),
            positions=_fill(self._positions, rows.positions),
            slots=_fill(self._slots, rows.slots),
            sample_rows=_fill(self._sample_rows, rows.sample_rows),
            pooled=rows.pooled,
            spans=rows.spans,
            capacity=self._capacity,
            samples=len(rows.sample_rows),
        )


def _fill(buffer: Tensor, values: list[int]) -> Tensor:
    view = buffer[: len(values)]
    if buffer.device.type == "cpu":
        view.numpy()[:] = values  # several times quicker than by way of another tensor
    else:
        view.copy_(torch.tensor(values, dtype=torch.int32))
    return view
