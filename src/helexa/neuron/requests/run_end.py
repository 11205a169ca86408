"""Account for the end of a run on every code path: completion, failure or disconnection."""

import logging
import time

from helexa.core.errors import ApiError
from helexa.core.logs import tell
from helexa.neuron.engine.ipc.messages import Timing, TokenOutput
from helexa.neuron.events import Failed, Finished, FinishReason, PromptCounted, Started
from helexa.neuron.lifecycle.model import ServedModel
from helexa.neuron.requests.answer_reader import AnswerReader
from helexa.neuron.requests.request_record import RunRecord, current

logger = logging.getLogger(__name__)


class RunEnd:
    """Ends a run exactly once: builds its last event, records token counts and timing, and logs one line."""

    def __init__(self, model: ServedModel, prompt_tokens: int, reader: AnswerReader) -> None:
        self.closed = False
        self._model = model
        self._reader = reader
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._resumed = False
        self._timing: Timing | None = None
        self._begin = time.perf_counter()
        self._entered: float | None = None
        self._first_token: float | None = None

    @property
    def admitted(self) -> bool:
        """Return whether the run was admitted."""
        return self._entered is not None

    def started(self) -> Started:
        """Record the admission. Return the run's first event."""
        self._entered = time.perf_counter()
        return Started(self._prompt_tokens)

    def prompt_counted(self) -> PromptCounted:
        """Return the event that reports the prompt's token counts when the prefill begins."""
        return PromptCounted(self._prompt_tokens, self._cached_tokens)

    def count(self, output: TokenOutput) -> int:
        """Record an output of the engine. Return the number of tokens of the run in the KV cache; 0 before the first

        Return the number of tokens of the run in the KV cache; 0 before the first token.
        """
        if output.tokens and self._first_token is None:
            self._first_token = time.perf_counter()
        if not self._resumed:
            self._cached_tokens += output.cached_tokens
            self._timing = output.timing or self._timing
        return self._prompt_tokens + self._reader.tokens if self._first_token is not None else 0

    def resume(self) -> None:
        """Record that a second engine sequence continues the answer. Its timing and cache hits do not count."""
        self._resumed = True
        self._timing = None

    def finish(self, reason: FinishReason, stop_string: str | None) -> Finished:
        """Record a complete answer and return the run's last event."""
        timing = self._close(reason)
        return Finished(
            reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._reader.tokens,
            prefill_ms=timing.prefill_ms,
            decode_ms=timing.decode_ms,
            stop_string=stop_string,
            reasoning_tokens=self._reader.reasoning_tokens,
        )

    def fail(self, error: ApiError) -> Failed:
        """Record a failed run and return the run's last event."""
        self._close("error")
        return Failed(error)

    def abandon(self, unread: int = 0) -> None:
        """Record a run whose client disconnected; do nothing if the run has ended.

        Args:
            unread: number of generated tokens that were not read, which count as output.
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

    def _measured(self) -> Timing:
        """Return the timing that the server measured, for a run that ended before the engine reported its timing."""
        now = time.perf_counter()
        if self._entered is None:
            return Timing(queue_ms=(now - self._begin) * 1000, prefill_ms=0.0, decode_ms=0.0)
        first = self._first_token or now
        return Timing(queue_ms=0.0, prefill_ms=(first - self._entered) * 1000, decode_ms=(now - first) * 1000)
