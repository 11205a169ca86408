"""The plan of a step: what is computed of which sequences."""

from dataclasses import dataclass

from helexa.neuron.engine.ngram import Drafter
from helexa.neuron.engine.sequence import Sequence

UNSOUND = -1
"""Stands for the token that a row of logits yields that are no finite numbers."""

MOST_DRAFTS = 16
"""Rows that speculation may add to a sequence."""


@dataclass(frozen=True)
class PlanEntry:
    """`sequence` advances by `count` tokens; `samples` when that reaches its last known token.

    `drafts` are guesses of the tokens that come after it: the `drafter`'s, if they are not all that a grammar leaves.
    They are computed along, and kept as far as they are what is sampled in their places. `restore` and `save` are slots
    of snapshots (see `states`): where the recurrent state of the sequence comes from before the step, and where a copy
    of it goes after.
    """

    sequence: Sequence
    count: int
    drafts: tuple[int, ...] = ()
    restore: int | None = None
    save: int | None = None
    drafter: Drafter | None = None

    @property
    def samples(self) -> bool:
        """Whether this step yields a new token for the sequence."""
        return self.completes and self.sequence.pooled is None

    @property
    def completes(self) -> bool:
        """Whether all that is known of the sequence is computed after the step."""
        return self.count == self.sequence.pending


Plan = list[PlanEntry]
