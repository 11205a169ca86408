"""One request at a time: the latency for a single user."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.prompt_request import PromptRequest, Turn
from helexa.bench.scenarios.scenario import Outcome, Subject, first_failure, fits
from helexa.bench.targets.target import Control, ServedModel

_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Single:
    """One request with a prompt of a given size.

    If `cache` is `cold`, the prompt does not hit the prefix cache. If `cache` is `warm`, the prefix cache contains the
    prompt except its last few tokens.
    """

    warms_up: ClassVar[bool] = True

    prompt_tokens: int
    max_tokens: int
    cache: Literal["cold", "warm"]

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens, "cache": self.cache}
        return ScenarioKey(f"single:{self.cache}:{self.prompt_tokens}", "single", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and its context is long enough for prompt and response."""
        return fits(model, self.prompt_tokens + _TAIL_TOKENS, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send one request.

        If `cache` is `warm`, an unrecorded request first puts the prompt's prefix into the prefix cache.
        """
        if self.cache == "warm":
            return await warm_request(subject, seed, self.prompt_tokens, self.max_tokens)
        turns = subject.prompts(seed).cold(self.prompt_tokens)
        return await _outcome_of(subject, turns, self.max_tokens)


@dataclass(frozen=True, slots=True)
class DecodeAtDepth:
    """A request that decodes after a long cached context. Because of the cache hit, prefill takes almost no time."""

    warms_up: ClassVar[bool] = True

    depth_tokens: int
    max_tokens: int

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {"depth_tokens": self.depth_tokens, "max_tokens": self.max_tokens}
        return ScenarioKey(f"decode:{self.depth_tokens}", "decode", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and its context is long enough for cached context and response."""
        return fits(model, self.depth_tokens + _TAIL_TOKENS, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Put the context into the prefix cache with an unrecorded request, then send the measured request."""
        return await warm_request(subject, seed, self.depth_tokens, self.max_tokens)


async def warm_request(subject: Subject, seed: int, prompt_tokens: int, max_tokens: int) -> Outcome:
    """Put a prefix into the prefix cache with an unrecorded request, then send a measured request with this prefix.

    Args:
        subject: the model to measure, and the client of the server.
        seed: random seed of the prompt.
        prompt_tokens: tokens of the prefix.
        max_tokens: maximum number of tokens of the measured response.
    """
    prompts = subject.prompts(seed)
    prefix = prompts.prefix(prompt_tokens)
    priming = await subject.client.ask(PromptRequest(subject.model.name, prompts.warm(prefix), max_tokens=1))
    if priming.status != "ok":
        return Outcome(error=f"while warming the cache: {first_failure([priming])}")
    return await _outcome_of(subject, prompts.warm(prefix, _TAIL_TOKENS), max_tokens)


async def _outcome_of(subject: Subject, turns: list[Turn], max_tokens: int) -> Outcome:
    record = await subject.client.ask(PromptRequest(subject.model.name, turns, max_tokens, fixed_length=True))
    return Outcome([record], error=first_failure([record]))
