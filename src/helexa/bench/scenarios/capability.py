"""Capability probes: prompts whose responses are stored and scored, to compare not only speed but also quality."""

import re
from dataclasses import dataclass
from typing import ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.prompt_request import PromptRequest, Turn
from helexa.bench.scenarios.scenario import Outcome, Subject, first_failure, fits
from helexa.bench.targets.target import Control, ServedModel

_TOKENS_A_CHAR = 0.5


@dataclass(frozen=True, slots=True)
class Capability:
    """A prompt from the configuration, whose response is stored.

    The score is the share of the regular expressions `expect` that match the response. Without expressions, the
    benchmark sets no score. Users can add scores later.
    """

    warms_up: ClassVar[bool] = False

    name: str
    prompt: str
    max_tokens: int
    expect: tuple[str, ...] = ()

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {"prompt": self.prompt, "max_tokens": self.max_tokens, "expect": list(self.expect)}
        return ScenarioKey(f"capability:{self.name}", "capability", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and its context is long enough for prompt and response."""
        return fits(model, round(len(self.prompt) * _TOKENS_A_CHAR), self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send the prompt and score the response.

        All samples send the same request, so their responses are comparable.
        """
        record = await subject.client.ask(
            PromptRequest(subject.model.name, [Turn("user", self.prompt)], max_tokens=self.max_tokens)
        )
        matches = [bool(re.search(pattern, record.text)) for pattern in self.expect]
        return Outcome(
            [record],
            error=first_failure([record]),
            artifact=record.text,
            columns={"score": sum(matches) / len(matches)} if matches else {},
        )
