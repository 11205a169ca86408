"""Runs engine steps: plans and launches each step, reads its results, commits them, and handles failed steps."""

import logging
import time
from dataclasses import dataclass
from functools import partial

import torch

from helexa.neuron.engine.execution.device_errors import (
    OutOfMemoryCounter,
    is_device_fault,
    is_out_of_memory,
    release_frames,
)
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.execution.step_in_flight import StepInFlight
from helexa.neuron.engine.ipc.messages import TokenOutput
from helexa.neuron.engine.scheduling.overlap import as_after
from helexa.neuron.engine.scheduling.plan import Plan
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.token_masks import rejection_masks
from helexa.neuron.engine.step.step_output import StepOutput
from helexa.neuron.ops.constants import NON_FINITE
from helexa.neuron.processes import heartbeat

_log = logging.getLogger("helexa.neuron.engine")


@dataclass(frozen=True)
class _Step:
    """A planned step whose launch was attempted.

    Attributes:
        plan: the plan of the step.
        begun: time at which the launch started, in seconds of `time.perf_counter`.
        launched: the step in flight; None if the launch failed.
        error: the exception of a failed launch, else None.
    """

    plan: Plan
    begun: float
    launched: StepInFlight | None = None
    error: Exception | None = None

    def read(self) -> StepOutput:
        """Wait for the results of the step and return them. If the launch failed, raise its exception."""
        if self.launched is None:
            raise self.error or AssertionError("never launched")
        return self.launched.read(partial(rejection_masks, self.plan))


class Steps:
    """Runs the steps that `scheduler` plans on `runner`.

    Args:
        overlap: whether to launch the next step before the results of the current step are read, if possible. If a
            sequence turns out to end in the current step, the next step still computes one row for it. The result of
            this row is dropped.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, overlap: bool = False) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._overlap = overlap
        self._ahead: _Step | None = None
        self._strikes = OutOfMemoryCounter()
        self._read = 0.0  # time at which the results of the last step were read

    @property
    def idle(self) -> bool:
        """Whether no step is in flight and the scheduler has no sequences."""
        return self._ahead is None and self._scheduler.idle

    def advance(self) -> list[TokenOutput]:
        """Run one step and return its outputs. If there is nothing to compute, return no outputs.

        If a step fails because of one request, only this request ends with an error.

        Raises:
            Exception: the device or this process is no longer usable.
        """
        step, self._ahead = self._ahead or self._launch(self._scheduler.plan()), None
        if step is None:
            return []
        if self._overlap and step.launched is not None and self._scheduler.foresees(step.plan):
            with as_after(step.plan):
                self._ahead = self._launch(self._scheduler.plan_after(), step.launched)
        return self._finish(step)

    def _launch(self, plan: Plan, after: StepInFlight | None = None) -> _Step | None:
        if not plan:
            return None
        start_time = time.perf_counter()
        try:
            step = build_step(plan, self._runner.buckets, self._runner.encoder)
            start_time = time.perf_counter()  # the step controller must not learn the time of encoding images
            expected = self._scheduler.expected_seconds(plan) if self._runner.counts_kernels else 0.0
            with heartbeat.step_of(expected):
                return _Step(plan, start_time, self._runner.launch(step, after))
        except Exception as error:
            return _Step(plan, start_time, error=error)

    def _finish(self, step: _Step) -> list[TokenOutput]:
        plan = step.plan
        try:
            outcome = step.read()
        except Exception as error:
            out_of_memory = is_out_of_memory(error)
            if is_device_fault(error) or (out_of_memory and self._strikes.strike()):
                raise
            _log.error("a step of %d sequences failed", len(plan), exc_info=error)
            release_frames(error)  # releases the step's tensors
            if out_of_memory and self._runner.device.type == "cuda":
                torch.cuda.empty_cache()
            next_step, self._ahead = self._ahead, None
            message = f"the step failed: {type(error).__name__}"
            return self._scheduler.isolate(plan, message, None if next_step is None else next_step.plan)
        start_time, self._read = max(step.begun, self._read), time.perf_counter()
        seconds = self._read - start_time
        for entry in plan:
            if entry.sequence.request.traced:
                entry.sequence.trace_step(start_time, seconds, entry.count, len(plan))
        finite = _finite_tokens(plan, outcome) + _finite_vectors(plan, outcome)
        if any(finite):  # `finite` is empty if the step has only chunks of prompts
            self._strikes.reset()
        elif finite:
            probe_sequence = next(entry.sequence for entry in plan if entry.completes and entry.sequence.pages)
            if not self._runner.computes_finite_logits(probe_sequence.pages[-1], probe_sequence.slot):
                raise ArithmeticError("the device computes no finite numbers any more")
        outputs = self._scheduler.commit(
            plan, outcome.tokens, seconds, outcome.logprobs, outcome.hidden, outcome.scores
        )
        if pages := self._scheduler.take_pages_to_clear():
            self._runner.clear(pages)
            _log.error("%d of %d rows of logits and vectors are not finite", finite.count(False), len(finite))
        return outputs


def _finite_tokens(plan: Plan, outcome: StepOutput) -> list[bool]:
    """Return, for each sampled token of a step, whether the logits of the token's row were finite.

    Tokens of sequences that ended before the step was read are omitted.
    """
    rows = [entry.sequence for entry in plan if entry.samples for _ in range(len(entry.drafts) + 1)]
    return [token != NON_FINITE for sequence, token in zip(rows, outcome.tokens, strict=True) if sequence.pages]


def _finite_vectors(plan: Plan, outcome: StepOutput) -> list[bool]:
    """Return, for each embedding that the step completes, whether all of its numbers are finite.

    Sequences that ended before the step was read are omitted.
    """
    return [
        pooled.stays_finite(entry.sequence.computed, outcome.hidden.get(entry.sequence.id))
        for entry in plan
        if entry.completes and entry.sequence.pages and (pooled := entry.sequence.pooled) is not None
    ]
