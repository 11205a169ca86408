"""Open-loop load: requests are sent at given times even if earlier responses are late.

In a closed loop, a slow server receives fewer requests, and tail latencies look too low. An open loop avoids this
error.
"""

from dataclasses import dataclass
from typing import ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.load import Arrivals, arrival_times, open_loop
from helexa.bench.measurement.measures import Objectives
from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.measurement.request_record import RequestRecord
from helexa.bench.scenarios.scenario import Outcome, Subject, fits, load_failure, text_objectives
from helexa.bench.targets.target import Control, ServedModel


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests at a given rate for a fixed time, even if responses are late. No prompt hits the prefix cache."""

    warms_up: ClassVar[bool] = True

    rate_rps: float
    arrivals: Arrivals
    duration_secs: float
    prompt_tokens: int
    max_tokens: int
    objectives: Objectives

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {
            "rate_rps": self.rate_rps,
            "arrivals": self.arrivals,
            "duration_s": self.duration_secs,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "objectives": text_objectives(self.objectives),
            "cache": "cold",
        }
        return ScenarioKey(f"rate:{self.arrivals}:{self.rate_rps:g}", "rate", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and its context is long enough for prompt and response."""
        return fits(model, self.prompt_tokens, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send requests at their scheduled times, until `duration_secs` is over or the server is saturated.

        A sample of a saturated server is valid, because its failures show the server's limit.
        """
        prompts = subject.prompts(seed)

        async def ask(scheduled: float | None) -> RequestRecord:
            turns = prompts.cold(self.prompt_tokens)
            question = PromptRequest(subject.model.name, turns, self.max_tokens, fixed_length=True)
            return await subject.client.ask(question, scheduled=scheduled)

        offsets = list(arrival_times(self.rate_rps, self.duration_secs, self.arrivals, seed))
        loop = await open_loop(ask, offsets, subject.clock)
        answered = any(record.status == "ok" for record in loop.records)
        return Outcome(
            loop.records,
            error=None if loop.saturated and answered else load_failure(loop.records),
            saturated=loop.saturated,
            objectives=self.objectives,
            columns={"rate_rps": self.rate_rps},
        )
