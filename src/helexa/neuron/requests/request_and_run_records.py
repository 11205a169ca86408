"""Records of HTTP requests and their runs, for logs, metrics and usage."""

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from helexa.core import tracing
from helexa.core.errors import ApiError
from helexa.core.logs import tell
from helexa.core.wire.usage_and_encoded_lists import CacheMiss
from helexa.neuron.engine.ipc.messages import Timing, TokenOutput
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.output_events import Failed, Finished, FinishReason, PromptCounted, Started
from helexa.neuron.requests.answer_reader import AnswerReader

logger = logging.getLogger(__name__)

_CLOCK_SECONDS = 0.0005  # tolerance: the engine records the first token slightly after the end of its engine step

KEPT_SECONDS = 120.0
MOST_KEPT = 10_000

_HEADER = b"x-helexa-usage-id"
_PREFIX_HEADER = b"x-helexa-prefix"
_PREFIX = re.compile(rb"[0-9a-f]{16}")
_ID = re.compile(rb"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Token counts and durations of one run, which generates one answer."""

    model: str
    reason: str  # why the run ended: `stop`, `length`, `tool_calls`, `error` or `cancelled`
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # number of prompt tokens found in the prefix cache
    queue: float  # seconds that the run waited for admission and for its first engine step
    prefill: float
    decode: float
    # seconds from the start of the run to the first token, including waits; None if there was no token
    first_token: float | None
    admitted: bool = True
    position: tuple[int, int] = (0, 0)  # index of the prompt in the request, and of the answer to this prompt


@dataclass
class RequestRecord:
    """The record of one HTTP request and its response."""

    method: str = ""
    path: str = ""
    status: int = 0
    error_codes: list[str] = field(default_factory=list[str])
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    span: Any = None
    prefix_key: str = ""  # the gateway's id for the beginning of the prompt; empty if the request has no such id
    # time at which the request arrived, in seconds of `time.perf_counter`
    started: float = field(default_factory=time.perf_counter)

    @property
    def duration(self) -> float:
        """Number of seconds since the request arrived."""
        return time.perf_counter() - self.started


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def begin(record: RequestRecord) -> None:
    """Make `record` the request record that `current` returns in this task."""
    _current.set(record)


def prefix_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id that the gateway sends for the beginning of the prompt, or ""."""
    return next((value.decode() for name, value in headers if name == _PREFIX_HEADER and _PREFIX.fullmatch(value)), "")


def current() -> RequestRecord:
    """Return the record of the current task's request, or a new one that is not kept."""
    return _current.get() or RequestRecord()


class RunRecorder:
    """Collects a run's token counts and timing; records them when the run ends.

    A run is the generation of one answer. One of `finish`, `fail` and `abandon` ends the run.
    """

    def __init__(
        self,
        model: ServedModel,
        prompt_tokens: int,
        reader: AnswerReader,
        image_tokens: int = 0,
        position: tuple[int, int] = (0, 0),
    ) -> None:
        self.closed = False
        self._position = position
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
        """Record the admission of the run, and return its first event."""
        self._entered = time.perf_counter()
        return Started(self._prompt_tokens)

    def prompt_counted(self) -> PromptCounted:
        """Return the event with the numbers of prompt tokens and of cached tokens."""
        return PromptCounted(self._prompt_tokens, self._cached_tokens)

    def count(self, output: TokenOutput) -> int:
        """Record an output; return the number of the run's tokens in the KV cache.

        The answer reader must have read the output before. The number includes the prompt and the answer so far. It is
        0 before the first token of the answer.
        """
        if output.tokens and self._first_token is None:
            self._first_token = time.perf_counter()
        if not self._resumed:
            self._cached_tokens += output.cached_tokens
            self._timing = output.timing or self._timing
        return self._prompt_tokens + self._reader.tokens if self._first_token is not None else 0

    def resume(self) -> None:
        """Record that the answer continues as another sequence in the engine.

        The timing and the cached prompt tokens of the new sequence are not recorded.
        """
        self._resumed = True
        self._timing = None

    def finish(self, reason: FinishReason, stop_string: str | None, miss: CacheMiss | None = None) -> Finished:
        """Record the end of a complete answer, and return the last event."""
        if miss is not None:
            fields = {name: value for name, value in miss.items() if name != "text"}  # the log contains no prompts
            tell(logger, logging.INFO, "computed a prompt again", model=self._model.id, **fields)
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
            miss=miss,
        )

    def fail(self, error: ApiError) -> Failed:
        """Record the end of a run that failed, and return the last event."""
        self._close("error")
        return Failed(error)

    def abandon(self, unread: int = 0) -> None:
        """Record the end of a canceled run. Do nothing if the run has ended.

        Args:
            unread: number of tokens that the engine has generated but the server has not read. They count as output.
        """
        if not self.closed:
            self._close("cancelled", client_gone=True, unread=unread)

    def _close(self, reason: str, client_gone: bool = False, unread: int = 0) -> Timing:
        self.closed = True
        timing = self._timing or self._measured()
        if self._first_token is not None:
            # Without the engine's timing, no prefill rate is recorded, because the server cannot distinguish a wait in
            # the engine from prefill.
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
            position=self._position,
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
        """Add spans of the run, its phases and engine steps to the trace."""
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
        """Return durations that the server measured, for runs without engine timing."""
        now = time.perf_counter()
        if self._entered is None:
            return Timing(queue_ms=(now - self._begin) * 1000, prefill_ms=0.0, decode_ms=0.0)
        first = self._first_token or now
        return Timing(queue_ms=0.0, prefill_ms=(first - self._entered) * 1000, decode_ms=(now - first) * 1000)


@dataclass(frozen=True)
class UsageRecord:
    """Token counts of one request. A prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def total(cls, runs: Iterable[RunRecord]) -> "UsageRecord":
        """Return the token counts of admitted `runs`, the answers of one request."""
        begun = sorted((run for run in runs if run.admitted), key=lambda run: run.position)
        # Only the first answer to each prompt counts prompt tokens, as in the usage that the client receives. Later
        # answers to the same prompt find the prompt in the prefix cache.
        firsts = {run.position[0]: run for run in reversed(begun)}.values()
        return cls(
            sum(run.prompt_tokens for run in firsts),
            sum(run.completion_tokens for run in begun),
            sum(run.cached_tokens for run in firsts),
        )


class UsageRecords:
    """Token counts of recent requests, by the usage id that a gateway sends.

    A record is removed after `KEPT_SECONDS`. At most `MOST_KEPT` records are stored.
    """

    # A usage id begins with a secret of the gateway, so other clients cannot guess it.
    def __init__(self) -> None:
        self._running: dict[str, asyncio.Event] = {}
        self._ended: OrderedDict[str, tuple[float, UsageRecord]] = OrderedDict()

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Register a request that has a usage id, until `end`; return the id, or ""."""
        for name, value in headers:
            if name == _HEADER and _ID.fullmatch(value):
                usage_id = value.decode()
                self._running[usage_id] = asyncio.Event()
                return usage_id
        return ""

    def end(self, usage_id: str, runs: Iterable[RunRecord]) -> None:
        """Store the token counts of an ended request."""
        now = time.monotonic()
        self._ended[usage_id] = now, UsageRecord.total(runs)
        if running := self._running.pop(usage_id, None):
            running.set()
        while len(self._ended) > MOST_KEPT or now - next(iter(self._ended.values()))[0] > KEPT_SECONDS:
            self._ended.popitem(last=False)

    async def find(self, usage_id: str) -> UsageRecord | None:
        """Wait for the end of a request, and return its token counts.

        Return None without waiting if the id is unknown.
        """
        running = self._running.get(usage_id)
        if running is not None:
            await running.wait()
        entry = self._ended.get(usage_id)
        return None if entry is None else entry[1]
