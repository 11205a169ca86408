"""The plan of a step: which tokens of which sequences the step computes."""

from dataclasses import dataclass, field

from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.scheduling.sequence import Sequence


@dataclass
class PlanEntry:
    """One sequence's part of a step.

    Attributes:
        sequence: the sequence that advances.
        count: number of the sequence's known tokens that the step computes.
        drafts: draft tokens after the known tokens. The step computes them too; leading drafts that equal the sampled
            tokens are accepted.
        restore: slot of the snapshot from which the sequence's recurrent state is copied before the step (see
            `state_pool`).
        save: slot to which the sequence's recurrent state is copied after the step.
        drafter: source of the drafts; None if the grammar forces them.
        completes: all known tokens of the sequence are computed after the step.
        samples: the step yields a new token for the sequence.
        decoding: the step computes only tokens that the last step yielded.
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
