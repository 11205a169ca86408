"""The record of one request: filled while it is served, logged and counted once when it ends, however it ends."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What came of a run of a model.

    Attributes:
        model: its id.
        reason: `stop`, `length`, `tool_calls`, `error` or `cancelled`.
        cached_tokens: of the prompt, found in the KV cache.
        admitted: the engine was given the prompt.
        queue, prefill, decode: seconds.
        first_token: seconds from the prompt to the first token, waiting included; None when there was none.
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
class Exchange:
    """One request and its answer.

    Attributes:
        method, path: as they came.
        status: sent to the client, 0 before that.
        refusals: codes of the errors that were sent; each has its line in the log.
        runs: of a model, one for each answer; each has its line in the log.
        started: when the request came (`time.perf_counter`).
    """

    method: str = ""
    path: str = ""
    status: int = 0
    refusals: list[str] = field(default_factory=list[str])
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    started: float = field(default_factory=time.perf_counter)

    @property
    def duration(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def begin(exchange: Exchange) -> None:
    """Make it the one that is served here and now."""
    _current.set(exchange)


def current() -> Exchange:
    """The one that is served here and now; outside of a request, one that nobody looks at."""
    return _current.get() or Exchange()
