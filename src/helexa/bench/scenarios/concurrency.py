"""Closed-loop load: a fixed number of simulated users, each of which waits for a response before its next request."""

from dataclasses import dataclass
from typing import ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.load import closed_loop
from helexa.bench.measurement.measures import Objectives
from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.measurement.request_record import RequestRecord
from helexa.bench.scenarios.scenario import Outcome, Subject, fits, load_failure, text_objectives
from helexa.bench.targets.target import Control, ServedModel


@dataclass(frozen=True, slots=True)
class Concurrency:
    """A fixed number of concurrent requests for a fixed time. No prompt hits the prefix cache."""

    warms_up: ClassVar[bool] = True

    level: int
    duration_secs: float
    prompt_tokens: int
    max_tokens: int
    objectives: Objectives

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {
            "concurrency": self.level,
            "duration_s": self.duration_secs,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "objectives": text_objectives(self.objectives),
            "cache": "cold",
        }
        return ScenarioKey(f"concurrency:{self.level}", "concurrency", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and its context is long enough for prompt and response."""
        return fits(model, self.prompt_tokens, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send requests for the given time, with `level` requests in flight."""
        prompts = subject.prompts(seed)

        async def ask(scheduled: float | None) -> RequestRecord:
            turns = prompts.cold(self.prompt_tokens)
            question = PromptRequest(subject.model.name, turns, self.max_tokens, fixed_length=True)
            return await subject.client.ask(question, scheduled=scheduled)

        records = await closed_loop(ask, self.level, self.duration_secs, subject.clock)
        return Outcome(
            records,
            error=load_failure(records),
            objectives=self.objectives,
            columns={"concurrency": self.level},
        )
