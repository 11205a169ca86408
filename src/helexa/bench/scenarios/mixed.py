"""Measures the latency of short requests while the server processes long requests.

The latency shows how fairly the server schedules its requests.
"""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.load import arrival_times, closed_loop, open_loop
from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.measurement.request_record import RequestRecord
from helexa.bench.scenarios.scenario import Outcome, Subject, fits, load_failure
from helexa.bench.targets.target import Control, ServedModel

_PROBE_TOKENS = 32
_PROBES_RPS = 2.0


@dataclass(frozen=True, slots=True)
class Mixed:
    """Two kinds of requests that are sent concurrently.

    Long requests are sent one after the other, as background load. One-token requests (probes) are sent at a constant
    rate. Only the probes are measured.
    """

    warms_up: ClassVar[bool] = True

    prompt_tokens: int
    duration_secs: float
    max_tokens: int

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {
            "prompt_tokens": self.prompt_tokens,
            "duration_s": self.duration_secs,
            "max_tokens": self.max_tokens,
            "probe_tokens": _PROBE_TOKENS,
            "probes_rps": _PROBES_RPS,
            "cache": "cold",
        }
        return ScenarioKey(f"mixed:{self.prompt_tokens}", "mixed", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and its context is long enough for prompt and response."""
        return fits(model, self.prompt_tokens, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send long requests and probes concurrently.

        The sample is invalid if the long requests fail, because the probes would then be measured without load.
        """
        prompts = subject.prompts(seed)

        async def load(scheduled: float | None) -> RequestRecord:
            turns = prompts.cold(self.prompt_tokens)
            question = PromptRequest(subject.model.name, turns, self.max_tokens, fixed_length=True)
            return await subject.client.ask(question, scheduled=scheduled)

        async def probe(scheduled: float | None) -> RequestRecord:
            question = PromptRequest(subject.model.name, prompts.cold(_PROBE_TOKENS), max_tokens=1)
            return await subject.client.ask(question, scheduled=scheduled, role="probe")

        offsets = list(arrival_times(_PROBES_RPS, self.duration_secs, "constant", seed))
        async with asyncio.TaskGroup() as group:
            long = group.create_task(closed_loop(load, 1, self.duration_secs, subject.clock))
            probes = group.create_task(open_loop(probe, offsets, subject.clock))
        measured = probes.result().records
        return Outcome(
            sorted([*long.result(), *measured], key=lambda record: record.sent),
            measured=measured,
            error=load_failure(long.result()) or load_failure(measured),
            columns={"concurrency": 1},
        )
