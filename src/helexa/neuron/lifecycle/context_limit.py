"""Compute the context length that a model can offer now, for both admission and reports."""

from collections.abc import Callable
from dataclasses import dataclass

from helexa.core.fleet import Limit
from helexa.neuron.config import ContextLimitConfig

LEAST_BY_RATE = 4096
"""Smallest limit of a slow machine, in tokens; shorter contexts are useless for conversations."""

HOLD_SECONDS = 600.0

_STEP = 1024
_OUTPUT_PART = 4  # divisor: share of a short context that is left for the answer
# default prefill time limit in seconds, and assumed prompt tokens per second before a measurement
_CPU = (600.0, 100.0)
_ACCELERATOR = (120.0, 800.0)


@dataclass(frozen=True)
class Facts:
    """Fixed properties of an engine that limit a model's context.

    Attributes:
        context: largest number of tokens in a sequence, by training, configuration and cache size.
        pages: number of KV pages.
        page_size: tokens per KV page.
        page_bytes: bytes per KV page.
        cpu: the engine runs on a CPU.
    """

    context: int
    pages: int
    page_size: int
    page_bytes: int
    cpu: bool


@dataclass(frozen=True)
class Readings:
    """Current measurements that limit a model's context.

    Attributes:
        missing_bytes: bytes of the engine's memory grant that other programs use.
        tok_s_prefill: measured prompt tokens per second; 0 before a measurement.
    """

    missing_bytes: int = 0
    tok_s_prefill: float = 0.0


def context_limit(facts: Facts, readings: Readings, settings: ContextLimitConfig) -> Limit:
    """Return three limits, in tokens: of the context, of a prompt (`input`) and of an answer (`output`).

    The limit of a prompt is the context without the space reserved for an answer. A context of 0 means that there is no
    memory for any request.
    """
    context = min(facts.context, _cached_positions(facts, readings.missing_bytes))
    if settings.enabled:
        context = min(context, rate_ceiling(facts, readings, settings))
    context = min(context, settings.max_prompt_tokens or context)
    if context > _STEP:
        context -= context % _STEP
    output = min(settings.output_reserve_tokens, context // _OUTPUT_PART)
    return Limit(context=context, input=context - output, output=output)


def rate_ceiling(facts: Facts, readings: Readings, settings: ContextLimitConfig) -> int:
    """Return the length of the longest prompt, in tokens, whose prefill takes at most the configured time."""
    seconds = settings.target_prefill_latency_secs or (_CPU if facts.cpu else _ACCELERATOR)[0]
    return max(int(seconds * (readings.tok_s_prefill or first_rate(facts, settings))), LEAST_BY_RATE)


def first_rate(facts: Facts, settings: ContextLimitConfig) -> float:
    """Return the prefill rate, in prompt tokens per second, that is assumed before a measurement."""
    return settings.bootstrap_prefill_tok_per_sec or (_CPU if facts.cpu else _ACCELERATOR)[1]


class SteadyRate:
    """Smooths a measured rate to keep limits stable: the rate rises at once and falls late.

    If all measurements during `HOLD_SECONDS` are lower than the rate, it falls to the highest of these measurements.

    Args:
        first: rate before a measurement.
        clock: monotonic clock, in seconds.

    Attributes:
        rate: the smoothed rate.
    """

    def __init__(self, first: float, clock: Callable[[], float]) -> None:
        self.rate = first
        self._clock = clock
        self._lower = 0.0  # highest measurement since `_since`
        self._since: float | None = None

    def measure(self, rate: float) -> None:
        """Add a measurement, and raise or lower `rate` if necessary."""
        if rate >= self.rate:
            self.rate, self._since = rate, None
        elif self._since is None:
            self._lower, self._since = rate, self._clock()
        else:
            self._lower = max(self._lower, rate)
            if self._clock() - self._since >= HOLD_SECONDS:
                self.rate, self._since = self._lower, None


def _cached_positions(facts: Facts, missing_bytes: int) -> int:
    """Return the number of tokens that the KV cache can hold in the memory that is available, in full pages."""
    missing_pages = -(-missing_bytes // max(facts.page_bytes, 1))
    return max(facts.pages - missing_pages, 0) * facts.page_size
