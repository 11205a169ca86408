"""Overlap: what the step after one that the device still computes can be planned from.

All that such a step leaves open is which tokens it yields. As long as nothing but the device needs to know them, the
next step is planned and launched as if they were known, and takes them from where the device has put them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry


def foreseeable(plan: Plan) -> bool:
    """Whether a step after this one needs nothing of it but tokens, and those on the device alone."""
    return all(_foreseeable(entry) for entry in plan)


@contextmanager
def as_after(plan: Plan) -> Iterator[None]:
    """Let the sequences of a foreseeable plan stand where they will stand when it is committed.

    In place of each token that they will get stands its place among the step's tokens, counted from their end: -1 is
    the last.
    """
    advanced = [entry for entry in plan if entry.sequence.pages]  # others were cancelled meanwhile
    place = -sum(entry.samples for entry in plan)
    for entry in plan:
        if entry.sequence.pages:
            entry.sequence.computed += entry.count
            if entry.samples:
                entry.sequence.tokens.append(place)
        place += entry.samples
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
