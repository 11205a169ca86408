"""Tasks whose answers are stored and scored: quality next to speed."""

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
    """A prompt from the configuration.

    The score is the share of configured patterns that match the answer, if there are patterns. Users may add scores.
    """

    warms_up: ClassVar[bool] = False

    name: str
    prompt: str
    max_tokens: int
    expect: tuple[str, ...] = ()

    @property
    def key(self) -> ScenarioKey:
        """Key under which the scenario's samples are stored."""
        params = {"prompt": self.prompt, "max_tokens": self.max_tokens, "expect": list(self.expect)}
        return ScenarioKey(f"capability:{self.name}", "capability", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether a text model has room for prompt and answer."""
        return fits(model, round(len(self.prompt) * _TOKENS_A_CHAR), self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send the same request each time, so that answers are comparable."""
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
