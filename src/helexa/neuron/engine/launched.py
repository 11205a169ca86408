"""A step that the device computes: what it brings is read when it is wanted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from helexa.neuron.engine.logprobs import Logprobs
from helexa.neuron.engine.masks import refused
from helexa.neuron.engine.messages import Logprob
from helexa.neuron.engine.plan import Plan
from helexa.neuron.engine.prompt_scores import ScoresReadback
from helexa.neuron.engine.readback import Readback
from helexa.neuron.engine.sampler import Sampled


@dataclass(frozen=True)
class Outcome:
    """What a step brought.

    Attributes:
        tokens: for each entry that samples, in plan order: one, and one more per draft.
        logprobs: of those of them whose sequences ask, by their place in `tokens`.
        hidden: of sequences whose vector is wanted, by their ids, the sum of the step's hidden states that count.
        scores: of sequences whose prompts are scored, by their ids, the log-probabilities of the next prompt tokens.
    """

    tokens: list[int]
    logprobs: dict[int, Logprob] = field(default_factory=dict[int, Logprob])
    hidden: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    scores: dict[int, list[Logprob]] = field(default_factory=dict[int, list[Logprob]])


@dataclass(frozen=True)
class Launched:
    """A step under way.

    Attributes:
        sampled: the tokens, if any sequence gets one.
        logprobs: what is said of them.
        hidden: what `begin_sums` returned.
        scores: what `begin_scores` returned.
    """

    plan: Plan
    sampled: Sampled | None = None
    logprobs: Logprobs | None = None
    hidden: Mapping[int, Readback] = field(default_factory=dict[int, Readback])
    scores: Mapping[int, ScoresReadback] = field(default_factory=dict[int, ScoresReadback])

    @torch.inference_mode()
    def read(self) -> Outcome:
        """Wait for the step, and for none after it."""
        sums = {number: copy.wait() for number, copy in self.hidden.items()}
        scores = {number: copy.wait() for number, copy in self.scores.items()}
        if self.sampled is None or self.logprobs is None:
            return Outcome([], hidden=sums, scores=scores)
        tokens = self.sampled.read(partial(refused, self.plan))
        return Outcome(tokens, self.logprobs.of(tokens), sums, scores)


def begin_sums(plan: Plan, hidden: Tensor | None) -> dict[int, Readback]:
    """By sequence, the sum of the rows [P, H] that it wants, in float32; its sequences stand as they were planned.

    Whoever is cancelled before the step is read stands elsewhere by then.

    Args:
        hidden: the hidden states that are pooled or scored, in plan order, if any.
    """
    sums: dict[int, Readback] = {}
    if hidden is None:
        return sums
    first = 0
    for sequence, count in ((entry.sequence, entry.count) for entry in plan):
        rows = len(sequence.wanted(sequence.computed, sequence.computed + count))
        if rows and sequence.pooled is not None:
            sums[sequence.id] = Readback(hidden[first : first + rows].float().sum(0))
        first += rows
    return sums
