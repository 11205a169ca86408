"""One request at a time: the latency of a single user."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.prompt_request import PromptRequest, Turn
from helexa.bench.scenarios.scenario import Outcome, Subject, first_failure, fits
from helexa.bench.targets.target import Control, ServedModel

_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Single:
    """A prompt of a given size that is not in the cache (cold), or cached except for its end (warm)."""

    warms_up: ClassVar[bool] = True

    prompt_tokens: int
    max_tokens: int
    cache: Literal["cold", "warm"]

    @property
    def key(self) -> ScenarioKey:
        """Key under which the scenario's samples are stored."""
        params = {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens, "cache": self.cache}
        return ScenarioKey(f"single:{self.cache}:{self.prompt_tokens}", "single", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether a text model has room for prompt and answer."""
        return fits(model, self.prompt_tokens + _TAIL_TOKENS, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send one request; a warm request follows an unrecorded one-token request with the same prefix."""
        if self.cache == "warm":
            return await warm_request(subject, seed, self.prompt_tokens, self.max_tokens)
        turns = subject.prompts(seed).cold(self.prompt_tokens)
        return await _outcome_of(subject, turns, self.max_tokens)


@dataclass(frozen=True, slots=True)
class DecodeAtDepth:
    """Decoding after a cached context of a given depth, so that prefill takes almost no time."""

    warms_up: ClassVar[bool] = True

    depth_tokens: int
    max_tokens: int

    @property
    def key(self) -> ScenarioKey:
        """Key under which the scenario's samples are stored."""
        params = {"depth_tokens": self.depth_tokens, "max_tokens": self.max_tokens}
        return ScenarioKey(f"decode:{self.depth_tokens}", "decode", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether a text model has room for context and answer."""
        return fits(model, self.depth_tokens + _TAIL_TOKENS, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send a one-token request with the context, then the measured request."""
        return await warm_request(subject, seed, self.depth_tokens, self.max_tokens)


async def warm_request(subject: Subject, seed: int, prompt_tokens: int, max_tokens: int) -> Outcome:
    """Fill the cache with a prefix by an unrecorded request, then send the measured request with the prefix."""
    prompts = subject.prompts(seed)
    prefix = prompts.prefix(prompt_tokens)
    priming = await subject.client.ask(PromptRequest(subject.model.name, prompts.warm(prefix), max_tokens=1))
    if priming.status != "ok":
        return Outcome(error=f"while warming the cache: {first_failure([priming])}")
    return await _outcome_of(subject, prompts.warm(prefix, _TAIL_TOKENS), max_tokens)


async def _outcome_of(subject: Subject, turns: list[Turn], max_tokens: int) -> Outcome:
    record = await subject.client.ask(PromptRequest(subject.model.name, turns, max_tokens, fixed_length=True))
    return Outcome([record], error=first_failure([record]))
