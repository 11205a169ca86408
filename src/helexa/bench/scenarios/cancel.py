"""Measures the time from a client's disconnect until the server has released the request."""

from dataclasses import dataclass
from typing import ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.scenarios.scenario import Outcome, Subject, first_failure, fits
from helexa.bench.targets.target import Control, ServedModel

_CHUNKS = 3
_LOOK_SECS = 0.01
_LONGEST_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request whose client disconnects after three chunks.

    The server is polled until it no longer reports the request.
    """

    warms_up: ClassVar[bool] = True

    prompt_tokens: int
    max_tokens: int

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens, "chunks": _CHUNKS}
        return ScenarioKey("cancel", "cancel", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and `control` can report the number of requests in flight."""
        return control is not None and fits(model, self.prompt_tokens, self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send a request, disconnect after some chunks, and measure how long the server still reports the request."""
        control, name = subject.control, subject.model.name
        if control is None:
            return Outcome(error="the server does not say what is in flight")
        before = await control.in_flight(name)
        if before:
            return Outcome(error=f"{before} other requests are in flight")
        turns = subject.prompts(seed).cold(self.prompt_tokens)
        question = PromptRequest(name, turns, self.max_tokens, fixed_length=True)
        record = await subject.client.ask(question, cancel_after=_CHUNKS)
        if record.status != "cancelled":
            over = record.status == "ok"
            return Outcome([record], error="the answer was over too soon" if over else first_failure([record]))
        now = subject.clock.now
        while await control.in_flight(name):
            if now() - record.ended > _LONGEST_SECS:
                return Outcome([record], error=f"still in flight {_LONGEST_SECS:g} s after the client had hung up")
            await subject.clock.sleep_until(now() + _LOOK_SECS)
        return Outcome([record], columns={"release_s": now() - record.ended})
