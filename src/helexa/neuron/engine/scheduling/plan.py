"""The plan of a step: which sequences advance, and by how many tokens.

With overlap, the next step is planned and launched before the device has finished the previous step. The tokens that
the previous step samples are not known at this time. If only the device needs these tokens, the next step is planned
with placeholders, which the device replaces by the sampled tokens.

Tokens are first sampled without a grammar's mask. The grammar then checks the sampled token, which takes microseconds.
A mask over the whole vocabulary takes about a hundred times as long, so it is computed only for rejected tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from helexa.neuron.engine.grammar_matcher import Mask
from helexa.neuron.engine.scheduling.draft_length import ModelDrafter
from helexa.neuron.engine.scheduling.ngrams_and_counts import Drafter
from helexa.neuron.engine.scheduling.sequence import Sequence


@dataclass
class PlanEntry:
    """The tokens of one sequence that a step computes."""

    sequence: Sequence  # the sequence that advances
    count: int  # number of tokens of the sequence that the step computes, without drafts
    # Draft tokens that the step computes after these `count` tokens. The leading drafts that equal the sampled tokens
    # are accepted.
    drafts: tuple[int, ...] = ()
    # slot of the snapshot from which the sequence's recurrent state is copied before the step; None for no copy (see
    # `StatePool`)
    restore: int | None = None
    save: int | None = None  # slot to which the sequence's recurrent state is copied after the step; None for no copy
    drafter: Drafter | ModelDrafter | None = None  # source of the drafts; None if the grammar forces the drafts
    open_drafts: int = 0  # number of drafts that the draft model shall add before the step is built
    # whether all tokens of the sequence except the drafts are computed after the step
    completes: bool = field(init=False)
    samples: bool = field(init=False)  # whether the step yields a new token for the sequence
    # whether the sequence has finished prefill, so that the step computes no chunk of its prompt
    decoding: bool = field(init=False)

    def __post_init__(self) -> None:
        self.completes = self.count == self.sequence.pending
        self.samples = self.completes and self.sequence.pooled is None and self.sequence.request.max_tokens > 0
        self.decoding = self.sequence.decoding


Plan = list[PlanEntry]


def allows_planning_ahead(plan: Plan) -> bool:
    """Return whether the next step can be planned before `plan` has results."""
    return all(_allows_planning_ahead(entry) for entry in plan)


@contextmanager
def as_after(plan: Plan) -> Iterator[None]:
    """Context in which the sequences of `plan` are as they will be after its commit.

    `allows_planning_ahead(plan)` must be True. Sampled tokens are negative placeholders: indexes into the tokens that
    the step samples. -1 is the last sampled token.
    """
    advanced = [entry for entry in plan if entry.sequence.pages]  # without canceled sequences
    placeholder = -sum(entry.samples for entry in plan)
    for entry in plan:
        if entry.sequence.pages:
            entry.sequence.computed += entry.count
            if entry.samples:
                entry.sequence.tokens.append(placeholder)
        placeholder += entry.samples
    try:
        yield
    finally:
        for entry in advanced:
            entry.sequence.computed -= entry.count
            if entry.samples:
                entry.sequence.tokens.pop()


def _allows_planning_ahead(entry: PlanEntry) -> bool:
    sequence, sampling = entry.sequence, entry.sequence.request.sampling
    if sequence.request.prompt_logprobs is not None:
        return False
    # An entry that completes its prompt without sampling ends its sequence.
    if not entry.samples:
        return sequence.pooled is None and not entry.completes
    penalties = sampling.frequency_penalty or sampling.presence_penalty
    # The accepted drafts, the next allowed tokens and the counts of penalties depend on the sampled token, which is not
    # known yet.
    return not (entry.drafts or sequence.matcher is not None or penalties)


def rejection_masks(plan: Plan, tokens: list[int]) -> dict[int, Mask]:
    """Return masks of the allowed tokens for the rows whose token violates a grammar.

    Rows after a rejected draft get no mask. The call updates `ahead` and `error` of the grammar matchers.

    Args:
        tokens: the sampled token of each row of logits.

    Returns:
        The masks by index in `tokens`.
    """
    # Tokens after a rejected draft are not checked, because they are not used.
    masks: dict[int, Mask] = {}
    row = 0
    for entry in plan:
        count = len(entry.drafts) + 1 if entry.samples else 0
        matcher = entry.sequence.matcher
        if count and matcher is not None:
            for offset, mask in matcher.rejection_masks(tokens[row : row + count], entry.drafts).items():
                masks[row + offset] = mask
        row += count
    return masks
