"""The plan of a step: the sequences that the step advances, and the number of tokens of each sequence."""

from dataclasses import dataclass, field

from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.scheduling.sequence import Sequence


@dataclass
class PlanEntry:
    """The tokens of one sequence that a step computes.

    Attributes:
        sequence: the sequence that advances.
        count: number of tokens of the sequence that the step computes, without drafts.
        drafts: draft tokens that the step computes after these `count` tokens. The leading drafts that equal the
            sampled tokens are accepted.
        restore: slot of the snapshot from which the sequence's recurrent state is copied before the step; None for no
            copy (see `state_pool`).
        save: slot to which the sequence's recurrent state is copied after the step; None for no copy.
        drafter: source of the drafts; None if the grammar forces the drafts.
        completes: whether all tokens of the sequence except the drafts are computed after the step.
        samples: whether the step yields a new token for the sequence.
        decoding: whether the sequence has finished prefill, so that the step computes no chunk of its prompt.
    """

    sequence: Sequence
    count: int
    drafts: tuple[int, ...] = ()
    restore: int | None = None
    save: int | None = None
    drafter: Drafter | None = None
    completes: bool = field(init=False)
    samples: bool = field(init=False)
    decoding: bool = field(init=False)

    def __post_init__(self) -> None:
        self.completes = self.count == self.sequence.pending
        self.samples = self.completes and self.sequence.pooled is None and self.sequence.request.max_tokens > 0
        self.decoding = self.sequence.decoding


Plan = list[PlanEntry]
