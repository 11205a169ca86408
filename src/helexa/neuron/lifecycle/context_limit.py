"""How long a context a model may have here and now: decisions on numbers, the same for who asks and who is served."""

from collections.abc import Callable
from dataclasses import dataclass

from helexa.core.fleet import Limit
from helexa.neuron.config import ContextLimitConfig

LEAST_BY_RATE = 4096
"""Tokens that a slow machine does not go below: what is shorter is of no use to a conversation."""

HOLD_SECONDS = 600.0

_STEP = 1024
_OUTPUT_PART = 4  # the part of a short context that is left to the answer
_CPU = (600.0, 100.0)  # seconds that a prompt may take, and tokens a second while that is not measured
_ACCELERATOR = (120.0, 800.0)


@dataclass(frozen=True)
class Facts:
    """What an engine said of itself.

    Attributes:
        context: positions that a sequence may have, by training, configuration and cache.
        pages, page_size, page_bytes: of the KV cache.
        cpu: it runs on one.
    """

    context: int
    pages: int
    page_size: int
    page_bytes: int
    cpu: bool


@dataclass(frozen=True)
class Readings:
    """What is known at this moment.

    Attributes:
        missing_bytes: promised to the engine, but the machine does not have them any more.
        tok_s_prefill: measured; 0 before anything was.
    """

    missing_bytes: int = 0
    tok_s_prefill: float = 0.0


def context_limit(facts: Facts, readings: Readings, settings: ContextLimitConfig) -> Limit:
    """Tokens of prompt and answer together; of a prompt that leaves room for a full answer; and of that answer.

    A context of 0 says that there is no memory for any request.
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
    """Tokens of a prompt that is read in the time it may take."""
    seconds = settings.target_prefill_latency_secs or (_CPU if facts.cpu else _ACCELERATOR)[0]
    return max(int(seconds * (readings.tok_s_prefill or first_rate(facts, settings))), LEAST_BY_RATE)


def first_rate(facts: Facts, settings: ContextLimitConfig) -> float:
    """Prompt tokens a second to go by until they are measured."""
    return settings.bootstrap_prefill_tok_per_sec or (_CPU if facts.cpu else _ACCELERATOR)[1]


class SteadyRate:
    """A measured rate that is told so that limits made of it do not flap: it rises at once and falls late.

    It falls when it has been lower for `HOLD_SECONDS`, to the highest that was measured meanwhile.

    Args:
        first: what it is before anything is measured.

    Attributes:
        told: the rate to go by.
    """

    def __init__(self, first: float, clock: Callable[[], float]) -> None:
        self.told = first
        self._clock = clock
        self._lower = 0.0  # the highest since then
        self._since: float | None = None

    def measure(self, rate: float) -> None:
        """Take note of one measurement."""
        if rate >= self.told:
            self.told, self._since = rate, None
        elif self._since is None:
            self._lower, self._since = rate, self._clock()
        else:
            self._lower = max(self._lower, rate)
            if self._clock() - self._since >= HOLD_SECONDS:
                self.told, self._since = self._lower, None


def _cached_positions(facts: Facts, missing_bytes: int) -> int:
    """Positions that the KV cache can really hold: a page is worth nothing without memory behind it."""
    gone = -(-missing_bytes // max(facts.page_bytes, 1))
    return max(facts.pages - gone, 0) * facts.page_size
