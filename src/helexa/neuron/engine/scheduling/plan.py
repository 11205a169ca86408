"""The plan of a step: what is computed of which sequences."""

from dataclasses import dataclass, field

from helexa.neuron.engine.scheduling.ngram import Drafter
from helexa.neuron.engine.scheduling.sequence import Sequence


@dataclass
class PlanEntry:
    """`sequence` advances by `count` tokens; `samples` when that reaches its last known token.

    `drafts` are guesses of the tokens that come after it: the `drafter`'s, if they are not all that a grammar leaves.
    They are computed along, and kept as far as they are what is sampled in their places. `restore` and `save` are slots
    of snapshots (see `states`): where the recurrent state of the sequence comes from before the step, and where a copy
    of it goes after.

    Attributes:
        completes: all that is known of the sequence is computed after the step.
        samples: the step yields a new token for it.
        decoding: all that it computes of the sequence is what the last step brought.
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
