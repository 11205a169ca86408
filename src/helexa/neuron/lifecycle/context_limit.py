"""Compute the context length that a model can offer now. The node enforces the limit and reports it to clients."""

from collections.abc import Callable
from dataclasses import dataclass

from helexa.core.fleet import Limit
from helexa.neuron.config import ContextLimitConfig

LEAST_BY_RATE = 4096
"""Lower bound of the context limit that the prefill rate sets, in tokens. Conversations need at least this length."""

HOLD_SECONDS = 600.0

_STEP = 1024
_OUTPUT_PART = 4  # at most a quarter of the context is reserved for the output
# default prefill time limit in seconds, and assumed prompt tokens per second before a measurement
_CPU = (600.0, 100.0)
_ACCELERATOR = (120.0, 800.0)


@dataclass(frozen=True)
class EngineProperties:
    """Properties of an engine that limit a model's context length and do not change while the engine runs.

    Attributes:
        context: largest number of tokens in a sequence: the smallest of the trained context length, the configured
            length and the size of the KV cache.
        pages: total number of KV pages.
        page_size: tokens per KV page.
        page_bytes: bytes per KV page.
        cpu: whether the engine runs on a CPU.
    """

    context: int
    pages: int
    page_size: int
    page_bytes: int
    cpu: bool


@dataclass(frozen=True)
class Measurements:
    """Current measurements that limit a model's context length.

    Attributes:
        missing_bytes: bytes of memory that the node has granted to the engine but other programs use.
        tok_s_prefill: measured prefill rate in prompt tokens per second; 0 before the first measurement.
    """

    missing_bytes: int = 0
    tok_s_prefill: float = 0.0


def context_limit(engine: EngineProperties, measurements: Measurements, settings: ContextLimitConfig) -> Limit:
    """Return the current limits of a model, in tokens: `context`, `input` (prompt) and `output` (reserved for output).

    `input` is `context` minus `output`. A `context` of 0 means that there is no memory for any request.
    """
    context = min(engine.context, _cached_positions(engine, measurements.missing_bytes))
    if settings.enabled:
        context = min(context, rate_ceiling(engine, measurements, settings))
    context = min(context, settings.max_prompt_tokens or context)
    if context > _STEP:
        context -= context % _STEP
    output = min(settings.output_reserve_tokens, context // _OUTPUT_PART)
    return Limit(context=context, input=context - output, output=output)


def rate_ceiling(engine: EngineProperties, measurements: Measurements, settings: ContextLimitConfig) -> int:
    """Return the number of prompt tokens that a prefill processes in the configured time; at least `LEAST_BY_RATE`."""
    seconds = settings.target_prefill_latency_secs or (_CPU if engine.cpu else _ACCELERATOR)[0]
    return max(int(seconds * (measurements.tok_s_prefill or first_rate(engine, settings))), LEAST_BY_RATE)


def first_rate(engine: EngineProperties, settings: ContextLimitConfig) -> float:
    """Return the prefill rate, in prompt tokens per second, that is assumed before the first measurement."""
    return settings.bootstrap_prefill_tok_per_sec or (_CPU if engine.cpu else _ACCELERATOR)[1]


class SteadyRate:
    """Smooths the measured prefill rate, because a model's context limit depends on it and must not change often.

    If a measurement is higher than the rate, the rate rises to it immediately. If all measurements during
    `HOLD_SECONDS` are lower than the rate, the rate falls to the highest of these measurements.

    Args:
        first: rate before the first measurement, in tokens per second.
        clock: function that returns monotonic time in seconds.

    Attributes:
        rate: the smoothed rate, in tokens per second.
    """

    def __init__(self, first: float, clock: Callable[[], float]) -> None:
        self.rate = first
        self._clock = clock
        self._lower = 0.0  # highest measurement since `_since`
        self._since: float | None = None

    def measure(self, rate: float) -> None:
        """Add the measurement `rate`, in tokens per second, and update the smoothed rate."""
        if rate >= self.rate:
            self.rate, self._since = rate, None
        elif self._since is None:
            self._lower, self._since = rate, self._clock()
        else:
            self._lower = max(self._lower, rate)
            if self._clock() - self._since >= HOLD_SECONDS:
                self.rate, self._since = self._lower, None


def _cached_positions(engine: EngineProperties, missing_bytes: int) -> int:
    """Return how many tokens fit in the KV cache, without the pages whose memory other programs use.

    Args:
        engine: number and size of the KV pages.
        missing_bytes: bytes of the KV cache's memory that other programs use.
    """
    missing_pages = -(-missing_bytes // max(engine.page_bytes, 1))
    return max(engine.pages - missing_pages, 0) * engine.page_size
