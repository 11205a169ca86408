"""Overlap: the next step is planned and launched before the device has finished the previous step.

The tokens that the previous step samples are not known at this time. If only the device needs these tokens, the next
step is planned with placeholders. The device then replaces the placeholders by the sampled tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry


def foreseeable(plan: Plan) -> bool:
    """Return whether the step after `plan` can be planned before the results of `plan` are known."""
    return all(_foreseeable(entry) for entry in plan)


@contextmanager
def as_after(plan: Plan) -> Iterator[None]:
    """Within the context, set the sequences of `plan` to their state after the commit of `plan`.

    `foreseeable(plan)` must be True. The sampled tokens are not known yet, so each is replaced by a negative
    placeholder. A placeholder is an index into the tokens that the step samples: -1 is the last sampled token.
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
    return not (entry.drafts or sequence.matcher is not None or penalties)
