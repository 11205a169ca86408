"""A simulated runner for `Steps`: it fails, or returns non-finite results, for special prompt tokens."""

import torch
from simulated_cache import SimulatedCache, SimulatedStep

from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.step_output_logprobs_and_pooling import RejectionMasks, StepOutput
from helexa.neuron.ops.batch import Bucket
from helexa.neuron.ops.kernel_header import NON_FINITE

FATAL_LATE, FATAL, NOT_FINITE, STOP = 6, 7, 8, 9


def next_token(tokens: list[int]) -> int:
    """Return the next token, which is sometimes the stop token."""
    return STOP if sum(tokens) % 11 == 3 else 10 + sum(tokens) % 40


class SimulatedRunner(SimulatedCache):
    """A runner for plans instead of step inputs.

    Attributes:
        ahead: number of steps that were launched before the results of the previous step were read.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, next_token)
        self.device: torch.device | None = None
        self.buckets: list[Bucket] = []
        self.encoder = None
        self.draft = None
        self.draft_head = None
        self.counts_kernels = False
        self.ahead = 0
        self.entries = 0
        self.cleared: list[int] = []

    def launch(self, plan: Plan, after: SimulatedStep | None = None, keep: bool = False) -> SimulatedStep:
        if any(FATAL in entry.sequence.tokens for entry in plan):
            raise ValueError("simulated failure")
        step = super().launch(plan, after, keep)
        rows = [entry for entry in plan if entry.samples for _ in range(len(entry.drafts) + 1)]
        non_finite = [NOT_FINITE in entry.sequence.tokens for entry in rows]
        self.ahead += after is not None
        self.entries += len(plan)
        if any(FATAL_LATE in entry.sequence.tokens and entry.samples for entry in plan):
            return LateFailure(step.tokens)
        return SimulatedStep([NON_FINITE if bad else token for bad, token in zip(non_finite, step.tokens, strict=True)])

    def clear(self, pages: list[int]) -> None:
        self.cleared += pages

    def computes_finite_logits(self, parts: list[int], slot: int | None) -> bool:
        return True


class LateFailure(SimulatedStep):
    """A step whose failure is noticed when it is read."""

    def read(self, rejection_masks: RejectionMasks) -> StepOutput:
        raise ValueError("simulated failure")
