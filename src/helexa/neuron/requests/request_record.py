"""Record of one HTTP request. It is filled during the request, then logged and counted once, even after an error."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Token counts and timing of one run, in which a model generates one answer.

    Attributes:
        model: model id.
        reason: `stop`, `length`, `tool_calls`, `error` or `cancelled`.
        prompt_tokens: length of the prompt.
        completion_tokens: length of the answer.
        cached_tokens: number of prompt tokens found in the KV cache.
        queue, prefill, decode: duration of each phase, in seconds.
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
        method, path: HTTP method and path, as received.
        status: HTTP status sent to the client; 0 before the response begins.
        refusals: codes of the errors that the response contains. Each error has its own log line.
        runs: one record per answer. Each run has its own log line.
        started: time of the request's arrival (`time.perf_counter`).
    """

    method: str = ""
    path: str = ""
    status: int = 0
    refusals: list[str] = field(default_factory=list[str])
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    started: float = field(default_factory=time.perf_counter)

    @property
    def duration(self) -> float:
        """Return the seconds since the request's arrival."""
        return time.perf_counter() - self.started


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def begin(record: RequestRecord) -> None:
    """Make `record` the record of the current request."""
    _current.set(record)


def current() -> RequestRecord:
    """Return the record of the current request. Outside of a request, return a new record that is not used further."""
    return _current.get() or RequestRecord()
