"""The protocol of scenarios: key, requirements and execution."""

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
    """The target of a scenario's execution.

    Attributes:
        client: sends requests.
        model: the model.
        clock: source of times.
        salt: makes the prompts of this sample unique.
        control: loads and unloads models, or None if the server does not support it.
    """

    client: Client
    model: ServedModel
    clock: Clock
    salt: str
    control: Control | None = None

    def prompts(self, seed: int) -> Prompts:
        """Return a generator of prompts for this sample."""
        return Prompts(seed, self.salt)


@dataclass(slots=True)
class Outcome:
    """The result of a scenario.

    Attributes:
        records: all requests.
        measured: the measured requests; None for all.
        error: reason why the sample is invalid, or None.
        saturated: whether the server could not keep up with the load; higher loads are skipped.
        objectives: limits of good requests, or None.
        artifact: answer to store, or None.
        columns: further columns of `run`.
        extra: further data to store.
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
    """A named load.

    Attributes:
        warms_up: whether an unrecorded sample precedes the first sample of a cell.
    """

    warms_up: ClassVar[bool]

    @property
    def key(self) -> ScenarioKey:
        """Key under which the scenario's samples are stored."""
        ...

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the scenario can run with a model on a server with this control."""
        ...

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Run the scenario once. The same seed produces the same load."""
        ...


MOST_FAILURES = 0.05
"""Share of requests that may fail in a valid sample; rejections are not failures."""


def first_failure(records: Sequence[RequestRecord]) -> str | None:
    """Return the error of the first failed request, or None."""
    for record in records:
        if record.status != "ok":
            return f"{record.status}: {record.error or 'no reason given'}"
    return None if records else "nothing was asked"


def load_failure(records: Sequence[RequestRecord]) -> str | None:
    """Return the reason why a load is invalid: no answers, or too many failures; else None."""
    failed = [record for record in records if record.status in ("error", "timeout", "incomplete")]
    if not any(record.status == "ok" for record in records):
        return first_failure(records)
    if len(failed) > MOST_FAILURES * len(records):
        return f"{len(failed)} of {len(records)} requests failed; the first: {first_failure(failed)}"
    return None


def fits(model: ServedModel, prompt_tokens: int, answer_tokens: int) -> bool:
    """Return whether a text model has room for prompt and answer, including the chat template."""
    room = model.context is None or prompt_tokens * _SLACK + answer_tokens <= model.context
    return "text" in model.capabilities and room


_SLACK = 1.1  # prompts are counted in words


def text_objectives(objectives: Objectives) -> dict[str, float]:
    """Return the objectives that are set, as hashed and stored."""
    values = {"ttft_s": objectives.ttft_s, "tpot_s": objectives.tpot_s, "e2e_s": objectives.e2e_s}
    return {name: value for name, value in values.items() if value is not None}
