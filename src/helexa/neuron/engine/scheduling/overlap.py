"""Overlap: the next step is planned and launched while the device still computes the previous step.

At this time, the tokens that the previous step samples are not known. If only the device needs these tokens, the next
step is planned with placeholders. The device then replaces the placeholders by the sampled tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry


def foreseeable(plan: Plan) -> bool:
    """Return whether the step after `plan` can be planned before the results of `plan` are read."""
    return all(_foreseeable(entry) for entry in plan)


@contextmanager
def as_after(plan: Plan) -> Iterator[None]:
    """Within the context, set the sequences of `plan` to the state that they will have after its commit.

    `plan` must be foreseeable. Unknown sampled tokens are replaced by placeholders: the index of the token among the
    tokens that the step samples, counted from their end, so -1 is the last token.
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


def _foreseeable(entry: PlanEntry) -> bool:
    sequence, sampling = entry.sequence, entry.sequence.request.sampling
    if sequence.request.prompt_logprobs is not None:
        return False
    if not entry.samples:
        return sequence.pooled is None and not entry.completes
    penalties = sampling.frequency_penalty or sampling.presence_penalty
    return not (entry.drafts or sequence.guide is not None or penalties)
