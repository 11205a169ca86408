"""What every scenario is: a name, what it needs, and how it is run once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from helexa.bench.client import Client
from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.clock import Clock
from helexa.bench.measurement.measures import Objectives
from helexa.bench.measurement.prompts import Prompts
from helexa.bench.measurement.request_record import RequestRecord
from helexa.bench.targets.target import Control, ServedModel


@dataclass(frozen=True, slots=True)
class Subject:
    """What a scenario is run against.

    Attributes:
        salt: tells the prompts of this sample from all others.
        control: how the server is told to load and unload, where it can be told.
    """

    client: Client
    model: ServedModel
    clock: Clock
    salt: str
    control: Control | None = None

    def prompts(self, seed: int) -> Prompts:
        """A supply of prompts for this sample alone."""
        return Prompts(seed, self.salt)


@dataclass(slots=True)
class Outcome:
    """What came of a scenario.

    Attributes:
        records: all requests.
        measured: those of them that count; all when None.
        error: why the sample is no good; None when it is.
        saturated: the server could not keep up with what was asked; more need not be tried.
        columns: further columns of `run`.
        extra: what else is worth keeping.
    """

    records: Sequence[RequestRecord] = ()
    measured: Sequence[RequestRecord] | None = None
    error: str | None = None
    saturated: bool = False
    objectives: Objectives | None = None
    artifact: str | None = None
    columns: dict[str, float | int | None] = field(default_factory=dict[str, float | int | None])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


class Scenario(Protocol):
    """A load with a name.

    Attributes:
        warms_up: the first sample of a cell is preceded by one that is not recorded.
    """

    warms_up: ClassVar[bool]

    @property
    def key(self) -> ScenarioKey:
        """What its samples are stored under."""
        ...

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Whether it makes sense for a model, on a server with this much control."""
        ...

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Run it once. The same seed makes the same load."""
        ...


MOST_FAILURES = 0.05
"""Share of a load's requests that may fail without spoiling the sample; refusals are no failures."""


def first_failure(records: Sequence[RequestRecord]) -> str | None:
    """The first thing that went wrong."""
    for record in records:
        if record.status != "ok":
            return f"{record.status}: {record.error or 'no reason given'}"
    return None if records else "nothing was asked"


def load_failure(records: Sequence[RequestRecord]) -> str | None:
    """Why a load is no good: nothing was answered, or more failed than may."""
    failed = [record for record in records if record.status in ("error", "timeout", "incomplete")]
    if not any(record.status == "ok" for record in records):
        return first_failure(records)
    if len(failed) > MOST_FAILURES * len(records):
        return f"{len(failed)} of {len(records)} requests failed; the first: {first_failure(failed)}"
    return None


def fits(model: ServedModel, prompt_tokens: int, answer_tokens: int) -> bool:
    """Whether a text model has room for both, and some more for its template."""
    room = model.context is None or prompt_tokens * _SLACK + answer_tokens <= model.context
    return "text" in model.capabilities and room


_SLACK = 1.1  # prompts are counted in words


def text_objectives(objectives: Objectives) -> dict[str, float]:
    """Objectives as they are hashed and stored: those that are set."""
    values = {"ttft_s": objectives.ttft_s, "tpot_s": objectives.tpot_s, "e2e_s": objectives.e2e_s}
    return {name: value for name, value in values.items() if value is not None}
