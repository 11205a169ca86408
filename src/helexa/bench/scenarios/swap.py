"""Measures how long it takes to unload and load a model."""

from dataclasses import dataclass
from typing import ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.scenarios.scenario import Outcome, Subject, first_failure, fits
from helexa.bench.targets.target import Control, ServedModel, TargetError


@dataclass(frozen=True, slots=True)
class Swap:
    """Unloads a model, loads it again, and sends a request.

    The model is unavailable during the measurement, so sweeps do not include this scenario.
    """

    warms_up: ClassVar[bool] = False

    prompt_tokens: int
    max_tokens: int

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens, "cache": "cold"}
        return ScenarioKey("swap", "swap", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and can be loaded by `control`, the server's management API."""
        return control is not None and bool(model.load) and fits(model, self.prompt_tokens, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Unload the model, load it with the same quantization on the same devices, and send a request."""
        control, now = subject.control, subject.clock.now
        if control is None:
            return Outcome(error="the server cannot be told to load a model")
        start = now()
        await control.unload(subject.model.name)
        unloaded = now()
        try:
            await control.load(subject.model.load)
        except TargetError as error:
            spec = dict(subject.model.load)
            return Outcome(error=f"{subject.model.name} is unloaded and did not load again with {spec}: {error}")
        loaded = now()
        turns = subject.prompts(seed).cold(self.prompt_tokens)
        record = await subject.client.ask(PromptRequest(subject.model.name, turns, self.max_tokens, fixed_length=True))
        return Outcome(
            [record],
            error=first_failure([record]),
            columns={"unload_s": unloaded - start, "load_s": loaded - unloaded},
        )
