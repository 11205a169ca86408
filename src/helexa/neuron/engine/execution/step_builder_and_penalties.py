"""Builds the input of a step from its plan, without references to sequences."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from itertools import chain

import numpy as np

from helexa.neuron.engine.execution.image_encoder import ImageEncoder, ImageRows
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import Float32, HiddenRows, Int32, StepInput, fitting, int32
from helexa.neuron.engine.window_page_pool import WindowPages
from helexa.neuron.ops.batch import Bucket
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.sampling import Adjustments, Sampling

_MASK64 = (1 << 64) - 1
_NONE = Adjustments()

_Row = tuple[Sequence, tuple[int, ...]]  # a row of logits: its sequence, and the drafts that precede its sampled token
_Cells = tuple[Int32, Float32]  # the tokens whose logits are adjusted in a row, and each bias or penalty
_NO_CELLS: _Cells = (int32(), np.empty(0, np.float32))


def build_step(
    plan: Plan,
    buckets: Rows[Bucket] = (),
    encoder: ImageEncoder | None = None,
    windows: WindowPages | None = None,
    tail: int = 0,
) -> StepInput:
    """Return the input of the step that `plan` describes.

    Args:
        plan: the plan, which must not be empty.
        buckets: batch sizes for which graphs are captured. If the step fits into one, the input names this bucket.
        encoder: encoder of the images in the plan; None for a model that reads text only.
        windows: the window pages of the KV pages; None if all layers have the same pages.
        tail: number of last tokens of each prompt whose hidden states a draft head needs; 0 without a draft head.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    samples: dict[int, range] = {}  # sequence id -> rows whose logits are needed
    hidden: dict[int, range] = {}  # sequence id -> rows whose hidden states are needed
    # Sequences with one row come first (see `Batch.singles`). Among them, sequences of similar length are neighbors,
    # because attention in plain torch computes them in groups.
    order = sorted(plan, key=lambda e: (e.count + len(e.drafts) > 1, len(e.sequence.pages)))
    images = ImageRows()
    width = max(-(-(e.sequence.computed + e.count + len(e.drafts)) // PAGE_SIZE) for e in plan)
    pages = np.zeros((len(plan), width), np.int32)
    for entry, table_row in zip(order, pages, strict=True):
        sequence, drafts, start = entry.sequence, entry.drafts, len(tokens)
        computed = sequence.computed
        end = computed + entry.count + len(drafts)
        page_ids = sequence.pages[: -(-end // PAGE_SIZE)]
        table_row[: len(page_ids)] = page_ids
        if end - computed == 1:  # fast path for the most frequent case
            tokens.append(sequence.tokens[computed])
            positions.append(computed if sequence.images is None else computed + sequence.images.delta)
            slots.append(page_ids[-1] * PAGE_SIZE + computed % PAGE_SIZE)
        else:
            tokens += sequence.tokens[computed : end - len(drafts)]
            tokens += drafts
            delta = 0 if sequence.images is None else sequence.images.delta
            positions += range(computed + delta, end + delta)
            slots += [page_ids[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(computed, end)]
        if sequence.images is not None:
            assert encoder is not None
            images.add(entry, start, encoder)
        ends.append(len(tokens))
        samples[sequence.id] = range(len(tokens) - len(drafts) - 1, len(tokens))
        if hidden_range := wanted_states(entry, tail):
            hidden[sequence.id] = range(start + hidden_range.start - computed, start + hidden_range.stop - computed)
    sampling = [entry for entry in plan if entry.samples]
    pooled = [entry for entry in plan if entry.sequence.id in hidden] if hidden else []
    rows = chain(*(samples[entry.sequence.id] for entry in sampling), *(hidden[entry.sequence.id] for entry in pooled))
    longest = max(entry.count + len(entry.drafts) for entry in plan)
    # A released window page has the number -1. Kernels do not read its entry, but the number must be a valid index.
    window_pages = None if windows is None else np.maximum(windows.numbers, 0)[pages]
    window_slots = None if windows is None else windows.slots(int32(slots))
    return StepInput(
        tokens=int32(tokens),
        positions=images.positions(int32(positions)),
        slots=int32(slots),
        sample_rows=int32(list(rows)),
        starts=int32([0, *ends]),
        prefixes=int32([entry.sequence.computed for entry in order]),
        settled=int32([entry.count for entry in order]),
        state_slots=int32([entry.sequence.slot or 0 for entry in order]),
        pages=pages,
        hidden=[_hidden_rows(entry, tail) for entry in pooled],
        sampling=sampling_of(list(sampled_rows(sampling))) if sampling else None,
        restores=_copies((entry.restore, entry.sequence.slot) for entry in plan),
        saves=_copies((entry.sequence.slot, entry.save) for entry in plan),
        bucket=None if pooled or images else fitting(len(tokens), len(plan), longest, buckets),
        embeddings=images.embeddings,
        embedding_rows=images.rows,
        deepstack=images.deepstack,
        attention_ends=images.attention_ends(int32(positions)),
        window_pages=window_pages,
        window_slots=window_slots,
    )


def sampled_rows(sampling: Plan) -> Iterator[_Row]:
    """Yield the sequence and the preceding drafts of each row that samples a token.

    A plan entry with d drafts has d + 1 rows. The first row follows no drafts, and the last row follows all d drafts.
    """
    for entry in sampling:
        for count in range(len(entry.drafts) + 1):
            yield entry.sequence, entry.drafts[:count]


def sampling_of(rows: Rows[_Row]) -> Sampling:
    """Return the sampling settings of a step's rows of logits."""
    params = [sequence.request.sampling for sequence, _ in rows]
    return Sampling(
        filters=np.array([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params], np.float32),
        seeds=np.array([p.seed & _MASK64 for p in params], np.uint64),
        positions=np.array([len(sequence.tokens) + len(drafts) for sequence, drafts in rows], np.int64),
        logprobs={row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None},
        adjustments=_adjustments(rows),
    )


def _adjustments(rows: Rows[_Row]) -> Adjustments:
    cells = [kind(*row) for kind in (_biases, _repetitions, _presences) for row in rows]
    lengths = [len(tokens) for tokens, _ in cells]
    # Most requests have no penalties and biases. All of their steps share one empty object.
    if not any(lengths):
        return _NONE
    tokens, values = zip(*cells, strict=True)
    return Adjustments(int32(np.cumsum([0, *lengths])), np.concatenate(tokens), np.concatenate(values))


def _biases(sequence: Sequence, _: tuple[int, ...]) -> _Cells:
    return sequence.biases if sequence.request.sampling.logit_bias else _NO_CELLS


def _repetitions(sequence: Sequence, drafts: tuple[int, ...]) -> _Cells:
    penalty = sequence.request.sampling.repetition_penalty
    if penalty == 1.0:
        return _NO_CELLS
    tokens = sequence.token_counts.distinct()
    # The step in flight may still compute the last token. Its negative placeholder in `tokens` is not counted.
    placeholders = [token for token in (sequence.tokens[-1],) if token < 0]
    if drafts or placeholders:
        tokens = np.concatenate((tokens, int32([*placeholders, *drafts])))
    return tokens, np.full(len(tokens), penalty, np.float32)


def _presences(sequence: Sequence, drafts: tuple[int, ...]) -> _Cells:
    p = sequence.request.sampling
    if not (p.frequency_penalty or p.presence_penalty):
        return _NO_CELLS
    tokens, counts = sequence.output_counts.with_drafts(drafts)
    return tokens, np.asarray(p.presence_penalty + p.frequency_penalty * counts, np.float32)


def wanted_states(entry: PlanEntry, tail: int) -> range:
    """Return the positions of a sequence whose hidden states a step must return.

    For a draft head, rows that sample a token are not included, because the step keeps their hidden states anyway.

    Args:
        tail: see `build_step`.
    """
    sequence = entry.sequence
    end = sequence.computed + entry.count
    if may_keep(sequence) and not entry.decoding:
        return range(max(len(sequence.tokens) - 1 - tail, sequence.computed), end - entry.samples) if tail else range(0)
    return sequence.wanted(sequence.computed, end)


def may_keep(sequence: Sequence) -> bool:
    """Return whether hidden states of a sequence may be kept for a draft head."""
    others = sequence.pooled is None and sequence.request.prompt_logprobs is None
    return others and sequence.images is None and sequence.request.max_tokens > 1


def _hidden_rows(entry: PlanEntry, tail: int) -> HiddenRows:
    sequence, hidden_range = entry.sequence, wanted_states(entry, tail)
    alternatives = sequence.request.prompt_logprobs
    if may_keep(sequence):
        return HiddenRows(sequence.id, len(hidden_range), kept=True)
    if sequence.pooled is not None:
        return sequence.pooled.rows(sequence.id, hidden_range)
    if alternatives is None:
        return HiddenRows(sequence.id, len(hidden_range))
    next_tokens = int32(sequence.tokens[hidden_range.start + 1 : hidden_range.stop + 1])
    return HiddenRows(sequence.id, len(hidden_range), next_tokens, alternatives)


def _copies(pairs: Iterator[tuple[int | None, int | None]]) -> Int32:
    # A pair that contains None needs no copy: the sequence has no state slot, or there is no snapshot to copy.
    copies = [pair for pair in pairs if None not in pair]
    return int32(copies) if copies else np.empty((0, 2), np.int32)
