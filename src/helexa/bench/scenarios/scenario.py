"""The interface of scenarios: loads that a benchmark sends to a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from helexa.bench.client import Client
from helexa.bench.host_build_and_model import ScenarioKey
from helexa.bench.prompts_and_load_generators import Ask, Clock, PromptRequest, Prompts
from helexa.bench.request_records_and_metrics import Objectives, RequestRecord
from helexa.bench.servers import NeuronTarget, ServedModel

_SLACK = 1.1  # factor on prompt sizes, which are estimated from numbers of words


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a scenario measures, and the means to measure it."""

    client: Client  # client of the server
    model: ServedModel  # the model to measure
    clock: Clock  # source of the current time
    salt: str  # random text that makes the prompts of this sample unique
    # Management API of the server, which loads and unloads models and counts requests in flight. None if the server has
    # no such API.
    control: NeuronTarget | None = None

    def prompts(self, seed: int) -> Prompts:
        """Return a generator of prompts that are unique to this sample."""
        return Prompts(seed, self.salt)

    def cold_requests(self, prompts: Prompts, prompt_tokens: int, max_tokens: int) -> Ask:
        """Return a function that sends requests without prefix cache hits."""

        async def ask(scheduled: float | None) -> RequestRecord:
            turns = prompts.cold(prompt_tokens)
            question = PromptRequest(self.model.name, turns, max_tokens, fixed_length=True)
            return await self.client.ask(question, scheduled=scheduled)

        return ask


@dataclass(slots=True)
class Outcome:
    """The result of executing a scenario once."""

    records: Sequence[RequestRecord] = ()  # all requests that were sent
    measured: Sequence[RequestRecord] | None = None  # the requests from which metrics are computed, or None for all
    error: str | None = None  # reason why the sample is invalid, or None if it is valid
    # True if the server could not keep up with the load. Higher loads of the same kind are then skipped.
    saturated: bool = False
    objectives: Objectives | None = None  # latency limits for goodput, or None
    artifact: str | None = None  # response text to store, or None
    # additional columns of the sample's row in the table `run`
    columns: dict[str, float | int | None] = field(default_factory=dict[str, float | int | None])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])  # additional JSON data to store


class Scenario:
    """Base class of scenarios: loads that can be sent to a model.

    Subclasses are dataclasses whose fields are the parameters of the load.
    """

    kind: ClassVar[str]  # kind of the scenario in the database, for example `single`
    # True if the scenario is executed once before the first sample, with the result discarded
    warms_up: ClassVar[bool] = True

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        return ScenarioKey(self._name(), self.kind, self._params())

    def suits(self, model: ServedModel, control: NeuronTarget | None) -> bool:
        """Return whether the scenario can run with this model.

        Args:
            control: the node's management API, or None if the server has none.
        """
        return fits(model, *self._tokens())

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Execute the scenario once; `seed` determines the load. May raise `TargetError`."""
        raise NotImplementedError

    def _name(self) -> str:
        raise NotImplementedError

    def _params(self) -> dict[str, Any]:
        raise NotImplementedError

    def _tokens(self) -> tuple[int, int]:
        """Return the numbers of tokens of the longest prompt and of the longest response."""
        params = self._params()
        return params["prompt_tokens"], params["max_tokens"]


def first_failure(records: Sequence[RequestRecord]) -> str | None:
    """Return why a scenario failed: status and error of the first failed request.

    Return None if all requests succeeded.

    An empty list of records counts as a failure: the result is then an error text.
    """
    for record in records:
        if record.status != "ok":
            return f"{record.status}: {record.error or 'no reason given'}"
    return None if records else "the scenario sent no request; raise the duration or the rate of this scenario"


def fits(model: ServedModel, prompt_tokens: int, answer_tokens: int) -> bool:
    """Return whether `model` generates text, in a large enough or unknown context."""
    # The actual number of prompt tokens may exceed `prompt_tokens`, because the benchmark counts words. The check
    # therefore adds 10 %.
    fits_context = model.context is None or prompt_tokens * _SLACK + answer_tokens <= model.context
    return "text" in model.capabilities and fits_context


def text_objectives(objectives: Objectives) -> dict[str, float]:
    """Return a scenario's latency limits that are not None, by metric."""
    values = {"ttft_s": objectives.ttft_s, "tpot_s": objectives.tpot_s, "e2e_s": objectives.e2e_s}
    return {name: value for name, value in values.items() if value is not None}
