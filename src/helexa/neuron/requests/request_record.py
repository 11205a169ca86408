"""The record of one HTTP request, which route functions fill. The middleware logs and counts it after the response."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Token counts and durations of one run. A run is the generation of one answer by a model.

    Attributes:
        model: id of the model.
        reason: why the run ended: `stop`, `length`, `tool_calls`, `error` or `cancelled`.
        prompt_tokens: number of prompt tokens.
        completion_tokens: number of generated tokens.
        cached_tokens: number of prompt tokens found in the prefix cache.
        queue: seconds that the run waited for admission and for its first engine step.
        prefill: seconds of the prefill.
        decode: seconds from the first to the last generated token.
        first_token: seconds from the start of the run to the first token, including waits; None if there was no token.
        admitted: whether admission control admitted the run to the engine.
    """

    model: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue: float
    prefill: float
    decode: float
    first_token: float | None
    admitted: bool = True


@dataclass
class RequestRecord:
    """One HTTP request and its response.

    Attributes:
        method: HTTP method of the request.
        path: path of the request.
        status: HTTP status of the response; 0 before the response begins.
        error_codes: codes of the errors that the node sent in the response.
        runs: one record per generated answer.
        span: OpenTelemetry span of the request; None without tracing.
        started: time at which the request arrived, in seconds of `time.perf_counter`.
    """

    method: str = ""
    path: str = ""
    status: int = 0
    error_codes: list[str] = field(default_factory=list[str])
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    span: Any = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def duration(self) -> float:
        """Number of seconds since the request arrived."""
        return time.perf_counter() - self.started


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def begin(record: RequestRecord) -> None:
    """Make `record` the record of the current request, which `current` returns in the same asyncio task."""
    _current.set(record)


def current() -> RequestRecord:
    """Return the record of the request that the current asyncio task handles. Outside of requests, return a new one."""
    return _current.get() or RequestRecord()
