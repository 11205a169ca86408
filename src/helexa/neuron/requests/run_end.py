"""Record the token counts and timing of a run when it is complete, has failed, or the client has disconnected."""

import logging
import time

from helexa.core import tracing
from helexa.core.errors import ApiError
from helexa.core.logs import tell
from helexa.neuron.engine.ipc.messages import Timing, TokenOutput
from helexa.neuron.events import Failed, Finished, FinishReason, PromptCounted, Started
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.requests.answer_reader import AnswerReader
from helexa.neuron.requests.request_record import RunRecord, current

logger = logging.getLogger(__name__)

_CLOCK_SECONDS = 0.0005  # the engine notes the first token just after the end of the step that computed it


class RunEnd:
    """Collects the token counts and timing of one run, and records and logs them once when the run ends.

    A run is the generation of one answer. One of `finish`, `fail` and `abandon` ends the run.
    """

    def __init__(self, model: ServedModel, prompt_tokens: int, reader: AnswerReader, image_tokens: int = 0) -> None:
        self.closed = False
        self._model = model
        self._reader = reader
        self._prompt_tokens = prompt_tokens
        self._image_tokens = image_tokens
        self._cached_tokens = 0
        self._resumed = False
        self._timing: Timing | None = None
        self._begin = time.perf_counter()
        self._entered: float | None = None
        self._first_token: float | None = None

    @property
    def admitted(self) -> bool:
        """Whether admission control has admitted the run."""
        return self._entered is not None

    def started(self) -> Started:
        """Record that admission control has admitted the run. Return the first event of the run."""
        self._entered = time.perf_counter()
        return Started(self._prompt_tokens)

    def prompt_counted(self) -> PromptCounted:
        """Return the event with the number of prompt tokens and the number of them found in the prefix cache."""
        return PromptCounted(self._prompt_tokens, self._cached_tokens)

    def count(self, output: TokenOutput) -> int:
        """Record an output of the engine. Return how many tokens the run has in the KV cache; 0 before the first token.

        The tokens are those of the prompt and of the answer so far.
        """
        if output.tokens and self._first_token is None:
            self._first_token = time.perf_counter()
        if not self._resumed:
            self._cached_tokens += output.cached_tokens
            self._timing = output.timing or self._timing
        return self._prompt_tokens + self._reader.tokens if self._first_token is not None else 0

    def resume(self) -> None:
        """Record that the answer continues as a second sequence in the engine, after the server closed the reasoning.

        The timing and the cached prompt tokens of the second sequence are not recorded.
        """
        self._resumed = True
        self._timing = None

    def finish(self, reason: FinishReason, stop_string: str | None) -> Finished:
        """Record the end of a run with a complete answer, and return the last event of the run."""
        timing = self._close(reason)
        return Finished(
            reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            image_tokens=self._image_tokens,
            completion_tokens=self._reader.tokens,
            prefill_ms=timing.prefill_ms,
            decode_ms=timing.decode_ms,
            stop_string=stop_string,
            reasoning_tokens=self._reader.reasoning_tokens,
        )

    def fail(self, error: ApiError) -> Failed:
        """Record the end of a run that failed with `error`, and return the last event of the run."""
        self._close("error")
        return Failed(error)

    def abandon(self, unread: int = 0) -> None:
        """Record the end of a run that was canceled because the client disconnected. Do nothing if the run has ended.

        Args:
            unread: number of tokens that the engine has generated but the server has not read. They count as output.
        """
        if not self.closed:
            self._close("cancelled", client_gone=True, unread=unread)

    def _close(self, reason: str, client_gone: bool = False, unread: int = 0) -> Timing:
        self.closed = True
        timing = self._timing or self._measured()
        if self._first_token is not None:
            # Without the engine's timing, a wait in the engine looks like prefill.
            prefilled = self._prompt_tokens - self._cached_tokens if self._timing is not None else 0
            self._model.record(timing, prefilled, self._reader.tokens)
        first_token = None if self._first_token is None else self._first_token - self._begin
        waited = 0.0 if self._entered is None else self._entered - self._begin
        run = RunRecord(
            model=self._model.id,
            reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._reader.tokens + unread,
            cached_tokens=self._cached_tokens,
            queue=waited + timing.queue_ms / 1000,
            prefill=timing.prefill_ms / 1000,
            decode=timing.decode_ms / 1000,
            first_token=first_token,
            admitted=self.admitted,
        )
        current().runs.append(run)
        self._trace(run, timing)
        if self._reader.repairs:
            mistakes = ",".join(sorted(self._reader.repairs))
            tell(logger, logging.INFO, "repaired tool calls", model=run.model, mistakes=mistakes)
        tell(
            logger,
            logging.INFO,
            "completed",
            model=run.model,
            prompt_tokens=run.prompt_tokens,
            completion_tokens=run.completion_tokens,
            cached_tokens=run.cached_tokens,
            reasoning_tokens=self._reader.reasoning_tokens,
            finish_reason=reason,
            queue_ms=round(run.queue * 1000),
            ttft_ms=None if first_token is None else round(first_token * 1000),
            prefill_ms=round(timing.prefill_ms),
            decode_ms=round(timing.decode_ms),
            client_gone=client_gone,
        )
        return timing

    def _trace(self, run: RunRecord, timing: Timing) -> None:
        """Add the spans of the run, its phases and its engine steps to the trace of the request, if there is one."""
        attributes: tracing.Attributes = {
            "gen_ai.request.model": run.model,
            "gen_ai.response.finish_reasons": run.reason,
            "gen_ai.usage.input_tokens": run.prompt_tokens,
            "gen_ai.usage.output_tokens": run.completion_tokens,
            "helexa.cached_tokens": run.cached_tokens,
        }
        span = tracing.child_span(current().span, "run", self._begin, time.perf_counter(), attributes)
        if span is None:
            return
        started = self._begin + run.queue
        first = started + run.prefill
        tracing.child_span(span, "queue", self._begin, started)
        if self.admitted:
            phases = (
                tracing.child_span(span, "prefill", started, first),
                tracing.child_span(span, "decode", first, first + run.decode),
            )
            arrived = started - timing.queue_ms / 1000
            for step in timing.steps:
                begun = arrived + step.begun_ms / 1000
                ended = begun + step.ms / 1000
                phase = phases[ended > first + _CLOCK_SECONDS]
                tracing.child_span(phase, "engine step", begun, ended, {"tokens": step.tokens, "batch": step.batch})

    def _measured(self) -> Timing:
        """Return the timing as the server process measured it. Used if the engine has not reported the run's timing."""
        now = time.perf_counter()
        if self._entered is None:
            return Timing(queue_ms=(now - self._begin) * 1000, prefill_ms=0.0, decode_ms=0.0)
        first = self._first_token or now
        return Timing(queue_ms=0.0, prefill_ms=(first - self._entered) * 1000, decode_ms=(now - first) * 1000)
