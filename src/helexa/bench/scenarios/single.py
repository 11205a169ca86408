"""Scenarios of one request: single, decode at depth, cancel, swap."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from helexa.bench.client import TargetError
from helexa.bench.prompts_and_load_generators import PromptRequest, Turn
from helexa.bench.scenarios.scenario import Outcome, Scenario, Subject, first_failure
from helexa.bench.servers import NeuronTarget, ServedModel

_TAIL_TOKENS = 16
_CHUNKS = 3
_POLL_SECS = 0.01
_MAX_RELEASE_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Single(Scenario):
    """One request with a prompt of a given size.

    If `cache` is `cold`, the prompt does not hit the prefix cache. If `cache` is `warm`, the prefix cache contains the
    prompt except its last few tokens.
    """

    kind: ClassVar[str] = "single"

    prompt_tokens: int
    max_tokens: int
    cache: Literal["cold", "warm"]

    def _name(self) -> str:
        return f"single:{self.cache}:{self.prompt_tokens}"

    def _params(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens, "cache": self.cache}

    def _tokens(self) -> tuple[int, int]:
        return self.prompt_tokens + _TAIL_TOKENS, self.max_tokens

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send one request.

        If `cache` is `warm`, an earlier request first puts the beginning of the prompt into the prefix cache.
        """
        if self.cache == "warm":
            return await _warm_request(subject, seed, self.prompt_tokens, self.max_tokens)
        turns = subject.prompts(seed).cold(self.prompt_tokens)
        return await _outcome_of(subject, turns, self.max_tokens)


@dataclass(frozen=True, slots=True)
class DecodeAtDepth(Scenario):
    """One request that decodes after a long cached context."""

    kind: ClassVar[str] = "decode"

    depth_tokens: int
    max_tokens: int

    def _name(self) -> str:
        return f"decode:{self.depth_tokens}"

    def _params(self) -> dict[str, Any]:
        return {"depth_tokens": self.depth_tokens, "max_tokens": self.max_tokens}

    def _tokens(self) -> tuple[int, int]:
        return self.depth_tokens + _TAIL_TOKENS, self.max_tokens

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Put the context into the prefix cache, then send the measured request."""
        return await _warm_request(subject, seed, self.depth_tokens, self.max_tokens)


async def _warm_request(subject: Subject, seed: int, prompt_tokens: int, max_tokens: int) -> Outcome:
    """Put a prefix into the prefix cache, then measure a request with this prefix."""
    prompts = subject.prompts(seed)
    prefix = prompts.prefix(prompt_tokens)
    priming = await subject.client.ask(PromptRequest(subject.model.name, prompts.warm(prefix), max_tokens=1))
    if priming.status != "ok":
        return Outcome(error=f"the request that fills the prefix cache failed: {first_failure([priming])}")
    return await _outcome_of(subject, prompts.warm(prefix, _TAIL_TOKENS), max_tokens)


async def _outcome_of(subject: Subject, turns: list[Turn], max_tokens: int) -> Outcome:
    record = await subject.client.ask(PromptRequest(subject.model.name, turns, max_tokens, fixed_length=True))
    return Outcome([record], error=first_failure([record]))


@dataclass(frozen=True, slots=True)
class Cancel(Scenario):
    """The time from a client's disconnect until the server has released the request.

    The client disconnects after three chunks. The benchmark then polls the server until the server no longer counts the
    request as in flight.
    """

    kind: ClassVar[str] = "cancel"

    prompt_tokens: int
    max_tokens: int

    def _name(self) -> str:
        return "cancel"

    def _params(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens, "chunks": _CHUNKS}

    def suits(self, model: ServedModel, control: NeuronTarget | None) -> bool:
        """Return whether the model generates text and `control` counts its requests."""
        return control is not None and Scenario.suits(self, model, control)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send a request, disconnect, and measure the time until the server releases it."""
        control, name = subject.control, subject.model.name
        if control is None:
            return Outcome(error="the server does not report its requests in flight; measure a target of kind 'neuron'")
        before = await control.in_flight(name)
        if before:
            return Outcome(error=f"{before} requests of other clients are in flight; measure when the server is idle")
        turns = subject.prompts(seed).cold(self.prompt_tokens)
        question = PromptRequest(name, turns, self.max_tokens, fixed_length=True)
        record = await subject.client.ask(question, cancel_after=_CHUNKS)
        if record.status != "cancelled":
            complete = record.status == "ok"
            error = f"the answer ended within {_CHUNKS} chunks; raise the scenario's max_tokens"
            return Outcome([record], error=error if complete else first_failure([record]))
        now = subject.clock.now
        while await control.in_flight(name):
            if now() - record.ended > _MAX_RELEASE_SECS:
                return Outcome(
                    [record],
                    error=f"the request is still in flight {_MAX_RELEASE_SECS:g} s after the disconnect; "
                    "see the server's log",
                )
            await subject.clock.sleep_until(now() + _POLL_SECS)
        return Outcome([record], columns={"release_s": now() - record.ended})


@dataclass(frozen=True, slots=True)
class Swap(Scenario):
    """The times to unload a model and to load it again, and one request afterwards.

    The model is unavailable during the measurement, so sweeps do not include this scenario.
    """

    kind: ClassVar[str] = "swap"
    warms_up: ClassVar[bool] = False

    prompt_tokens: int
    max_tokens: int

    def _name(self) -> str:
        return "swap"

    def _params(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens, "cache": "cold"}

    def suits(self, model: ServedModel, control: NeuronTarget | None) -> bool:
        """Return whether the model generates text and the server can load it."""
        return control is not None and bool(model.load) and Scenario.suits(self, model, control)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Unload the model, load it as before, and send a request.

        If the load fails, the model stays unloaded and the sample is invalid.
        """
        control, now = subject.control, subject.clock.now
        if control is None:
            return Outcome(error="the server has no API to load models; measure a target of kind 'neuron'")
        start = now()
        await control.unload(subject.model.name)
        unloaded = now()
        try:
            await control.load(subject.model.load)
        except TargetError as error:
            spec = dict(subject.model.load)
            return Outcome(
                error=f"{subject.model.name} was unloaded and did not load again; load it by hand with {spec}: {error}"
            )
        loaded = now()
        outcome = await _outcome_of(subject, subject.prompts(seed).cold(self.prompt_tokens), self.max_tokens)
        outcome.columns = {"unload_s": unloaded - start, "load_s": loaded - unloaded}
        return outcome
