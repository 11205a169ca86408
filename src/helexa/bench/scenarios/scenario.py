"""The interface of scenarios, and helpers that decide whether a sample is valid."""

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
    """The model that a scenario measures, and the objects that the scenario needs to measure the model.

    Attributes:
        client: client of the server.
        model: the model to measure.
        clock: source of the current time.
        salt: random text that makes the prompts of this sample unique.
        control: management API of the server, which loads and unloads models and counts requests in flight. None if the
            server has no such API.
    """

    client: Client
    model: ServedModel
    clock: Clock
    salt: str
    control: Control | None = None

    def prompts(self, seed: int) -> Prompts:
        """Return a generator of prompts that are unique to this sample."""
        return Prompts(seed, self.salt)


@dataclass(slots=True)
class Outcome:
    """The result of executing a scenario once.

    Attributes:
        records: all requests that were sent.
        measured: the requests from which metrics are computed, or None for all.
        error: reason why the sample is invalid, or None if it is valid.
        saturated: True if the server could not keep up with the load. Higher loads of the same kind are then skipped.
        objectives: latency limits for goodput, or None.
        artifact: response text to store, or None.
        columns: additional columns of the sample's row in the table `run`.
        extra: additional JSON data to store.
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
    """A load that can be sent to a model.

    Attributes:
        warms_up: True if the scenario needs a warm-up: before the first sample of a benchmark configuration, it is
            executed once and the result is discarded.
    """

    warms_up: ClassVar[bool]

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        ...

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the scenario can run with this model.

        Args:
            model: the model.
            control: management API of the server, or None if the server has none.
        """
        ...

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Execute the scenario once. The same `seed` produces the same load."""
        ...


MOST_FAILURES = 0.05
"""Largest share of failed requests in a valid sample.

Requests rejected by an overloaded server do not count as failed.
"""


def first_failure(records: Sequence[RequestRecord]) -> str | None:
    """Return a text with the status and the error of the first failed request. Return None if all requests succeeded.

    An empty list of records counts as a failure: the result is then an error text.
    """
    for record in records:
        if record.status != "ok":
            return f"{record.status}: {record.error or 'no reason given'}"
    return None if records else "nothing was asked"


def load_failure(records: Sequence[RequestRecord]) -> str | None:
    """Return why a sample of many requests is invalid, or None if it is valid.

    A sample is invalid if no request succeeded or more than 5 % of the requests failed.
    """
    failed = [record for record in records if record.status in ("error", "timeout", "incomplete")]
    if not any(record.status == "ok" for record in records):
        return first_failure(records)
    if len(failed) > MOST_FAILURES * len(records):
        return f"{len(failed)} of {len(records)} requests failed; the first: {first_failure(failed)}"
    return None


def fits(model: ServedModel, prompt_tokens: int, answer_tokens: int) -> bool:
    """Return whether the model generates text and its context is long enough for prompt and response.

    The actual number of prompt tokens may exceed `prompt_tokens`, because the benchmark counts words. The check
    therefore adds 10 %.
    """
    fits_context = model.context is None or prompt_tokens * _SLACK + answer_tokens <= model.context
    return "text" in model.capabilities and fits_context


_SLACK = 1.1  # prompts are counted in words


def text_objectives(objectives: Objectives) -> dict[str, float]:
    """Return the latency limits that are not None, as part of the scenario's stored parameters."""
    values = {"ttft_s": objectives.ttft_s, "tpot_s": objectives.tpot_s, "e2e_s": objectives.e2e_s}
    return {name: value for name, value in values.items() if value is not None}
