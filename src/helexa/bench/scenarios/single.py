"""One request at a time: what a person feels who has the machine to himself."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.prompt_request import Question, Turn
from helexa.bench.scenarios.scenario import Outcome, Subject, first_failure, fits
from helexa.bench.targets.target import Control, ServedModel

_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Single:
    """A prompt of a given size that no cache has seen (cold), or of which the cache has all but the end (warm)."""

    warms_up: ClassVar[bool] = True

    prompt_tokens: int
    max_tokens: int
    cache: Literal["cold", "warm"]

    @property
    def key(self) -> ScenarioKey:
        """What its samples are stored under."""
        params = {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens, "cache": self.cache}
        return ScenarioKey(f"single:{self.cache}:{self.prompt_tokens}", "single", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Text models with room for it."""
        return fits(model, self.prompt_tokens + _TAIL_TOKENS, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Ask once; before that, when warm, for one token after the same beginning."""
        if self.cache == "warm":
            return await warm_request(subject, seed, self.prompt_tokens, self.max_tokens)
        turns = subject.prompts(seed).cold(self.prompt_tokens)
        return await _asked(subject, turns, self.max_tokens)


@dataclass(frozen=True, slots=True)
class DecodeAtDepth:
    """Decoding behind a context of a given depth that is in the cache, so that hardly anything else takes time."""

    warms_up: ClassVar[bool] = True

    depth_tokens: int
    max_tokens: int

    @property
    def key(self) -> ScenarioKey:
        """What its samples are stored under."""
        params = {"depth_tokens": self.depth_tokens, "max_tokens": self.max_tokens}
        return ScenarioKey(f"decode:{self.depth_tokens}", "decode", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Text models with room for it."""
        return fits(model, self.depth_tokens + _TAIL_TOKENS, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Ask for one token after the context, then for all of them."""
        return await warm_request(subject, seed, self.depth_tokens, self.max_tokens)


async def warm_request(subject: Subject, seed: int, prompt_tokens: int, max_tokens: int) -> Outcome:
    """Let the cache see a prefix, unrecorded, then ask what goes on from it."""
    prompts = subject.prompts(seed)
    prefix = prompts.prefix(prompt_tokens)
    priming = await subject.client.ask(Question(subject.model.name, prompts.warm(prefix), max_tokens=1))
    if priming.status != "ok":
        return Outcome(error=f"while warming the cache: {first_failure([priming])}")
    return await _asked(subject, prompts.warm(prefix, _TAIL_TOKENS), max_tokens)


async def _asked(subject: Subject, turns: list[Turn], max_tokens: int) -> Outcome:
    record = await subject.client.ask(Question(subject.model.name, turns, max_tokens, fixed_length=True))
    return Outcome([record], error=first_failure([record]))
