"""`helexa-bench.toml`: what to measure, how, and where the results are kept and shown."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from helexa.bench.identity import TargetKind
from helexa.core import config, variables
from helexa.core.address import Address, Listen, base_url

ENV_PREFIX = "BENCH_"
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
Positive = Annotated[float, Field(gt=0)]


def _server(text: str) -> str:
    return base_url(text).removesuffix("/v1")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"'{text}' is no name; use letters, digits, '.', '_' and '-', 64 at most")
    return text


BaseUrl = Annotated[str, AfterValidator(_server)]
Name = Annotated[str, AfterValidator(_name)]


def _state_folder() -> Path:
    systemd = os.environ.get("STATE_DIRECTORY")
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(systemd.split(":")[0]) if systemd else home / "helexa-bench"


class BenchSection(config.Section):
    """`[bench]`.

    Attributes:
        sweep_interval_secs: from the start of one sweep to the start of the next.
        samples_per_version: good samples that each cell is topped up to; there is no verdict on fewer than 5.
        iteration_pause_secs: between two samples.
        request_timeout_secs: longest time that a request may take.
        db_path: where results are kept.
        seed: of prompts and schedules; with the same seed the same load is made.
        request_retention_days: requests of runs older than this are pruned, their runs are kept; 0 for never.
        telemetry_interval_secs: between two readings of a target's accelerators while it is measured.
    """

    sweep_interval_secs: Positive = 1800.0
    samples_per_version: int = Field(default=5, ge=1)
    iteration_pause_secs: float = Field(default=2.0, ge=0)
    request_timeout_secs: Positive = 600.0
    db_path: Path = Field(default_factory=lambda: _state_folder() / "bench.sqlite")
    seed: int = Field(default=0, ge=0)
    request_retention_days: int = Field(default=90, ge=0)
    telemetry_interval_secs: Positive = 1.0


class CapabilityProbe(config.Section):
    """One `[[scenarios.capability_probes]]` entry: a task whose answer is kept as an artifact and scored.

    Attributes:
        expect: regular expressions that the answer is checked for; the share that is found is its first score.
    """

    name: Name
    prompt: str = Field(min_length=1)
    max_tokens: int = Field(default=2048, ge=1)
    expect: list[str] = Field(default_factory=list[str])

    @model_validator(mode="after")
    def _check(self) -> Self:
        for pattern in self.expect:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"expect {pattern!r} is no regular expression: {error}") from None
        return self


class ObjectivesSection(config.Section):
    """`[scenarios.objectives]`: what a request must keep to count as good; without a value it is not asked for."""

    ttft_secs: Positive | None = 2.0
    tpot_secs: Positive | None = 0.1
    e2e_secs: Positive | None = None


class AgenticSection(config.Section):
    """`[scenarios.agentic]`: a conversation as coding agents have it.

    Attributes:
        conversations: how many run at once; 0 for none.
        turns: of each.
        system_tokens: prompt that all turns share.
        tool_tokens: median size of what a tool adds to each turn.
        tool_secs: median time that a tool takes.
    """

    conversations: int = Field(default=0, ge=0)
    turns: int = Field(default=25, ge=1)
    system_tokens: int = Field(default=8192, ge=1)
    tool_tokens: int = Field(default=256, ge=1)
    tool_secs: float = Field(default=1.0, ge=0)


class OpenLoopSection(config.Section):
    """`[scenarios.open_loop]`: requests come when they come, whether or not the server keeps up.

    Attributes:
        rates: requests per second, ascending; after the first that saturates the target no higher one is tried.
        arrivals: `poisson` or `constant`.
        duration_secs: of each rate.
        prompt_tokens: of each request.
    """

    rates: list[Positive] = Field(default_factory=list[float])
    arrivals: Literal["poisson", "constant"] = "poisson"
    duration_secs: Positive = 30.0
    prompt_tokens: int = Field(default=512, ge=1)


class ScenariosSection(config.Section):
    """`[scenarios]`. Empty lists and zeros leave a scenario out.

    Attributes:
        prompt_sizes: tokens of the single stream's prompts, cold and warm.
        decode_depths: tokens in the cache before a decode is timed.
        max_tokens: of an answer.
        concurrency_levels: requests that are kept in flight.
        concurrency_secs: how long they are kept in flight.
        concurrency_prompt_tokens: of each of them.
        probe_prompt_tokens: of long prompts beside which requests for one token are timed; 0 for none.
        cancel: hang up in the middle of an answer and time the release.
        tools, json_schema: check the correctness of calls and of answers that have to follow a schema.
        image_sizes: pixels of a square's side, on models that draw.
    """

    prompt_sizes: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [128, 4096])
    decode_depths: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list[int])
    max_tokens: int = Field(default=256, ge=2)
    concurrency_levels: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list[int])
    concurrency_secs: Positive = 30.0
    concurrency_prompt_tokens: int = Field(default=512, ge=1)
    open_loop: OpenLoopSection = Field(default_factory=OpenLoopSection)
    agentic: AgenticSection = Field(default_factory=AgenticSection)
    probe_prompt_tokens: int = Field(default=0, ge=0)
    cancel: bool = False
    tools: bool = False
    json_schema: bool = False
    image_sizes: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [1024])
    capability_probes: list[CapabilityProbe] = Field(default_factory=list[CapabilityProbe])
    objectives: ObjectivesSection = Field(default_factory=ObjectivesSection)


class ApiSection(config.Section):
    """`[api]`.

    Attributes:
        enabled: whether `run` shows results too.
        listen: address of the pages and the API.
        root_path: where a proxy in front of it has put it, as `/bench`.
    """

    enabled: bool = True
    listen: Listen = Address("127.0.0.1", 13132)
    root_path: str = ""


class AlertsSection(config.Section):
    """`[alerts]`.

    Attributes:
        webhook: gets a JSON object by POST for each alert.
        metrics: those that are judged.
        extra_samples: taken before an alert is believed.
        min_effect: smallest relative change that counts.
    """

    webhook: SecretStr | None = None
    metrics: list[str] = Field(default_factory=lambda: ["ttft_s", "tpot_s", "output_tps", "prefill_tps", "load_s"])
    extra_samples: int = Field(default=3, ge=0)
    min_effect: float = Field(default=0.03, ge=0)


class TargetSection(config.Section):
    """One `[[targets]]` entry.

    Attributes:
        name: unique name of the target.
        kind: `neuron`, `cortex`, or `openai` or `anthropic` for any server that speaks that dialect.
        endpoint: base URL, without `/v1`.
        label: name for people.
        bearer: key that the target asks for, if it does.
        models: measure these only; all that are warm when empty.
    """

    name: Name
    kind: TargetKind = "neuron"
    endpoint: BaseUrl
    label: str = ""
    bearer: SecretStr | None = None
    models: list[str] = Field(default_factory=list[str])


class BenchConfig(config.Section):
    """The whole file."""

    bench: BenchSection = Field(default_factory=BenchSection)
    scenarios: ScenariosSection = Field(default_factory=ScenariosSection)
    api: ApiSection = Field(default_factory=ApiSection)
    alerts: AlertsSection = Field(default_factory=AlertsSection)
    targets: list[TargetSection] = Field(default_factory=list[TargetSection])

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [target.name for target in self.targets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two targets are named '{name}'")
        return self


def load(path: Path | None) -> BenchConfig:
    """Read the file and the `BENCH_` variables; a relative `db_path` is taken from the file's own directory.

    Raises:
        ConfigError: one line naming what is wrong.
    """
    settings = config.load(BenchConfig, path, env_prefix=ENV_PREFIX)
    variables.log_unknown_variables(BenchConfig, prefix=ENV_PREFIX)
    if path is not None:
        settings.bench.db_path = path.absolute().parent / settings.bench.db_path
    return settings
