"""`helexa-bench.toml`: targets, scenarios, alerts, and storage of results."""

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
        sweep_interval_secs: seconds from the start of one sweep to the start of the next.
        samples_per_version: number of good samples per cell; verdicts require 5 or more.
        iteration_pause_secs: seconds between two samples.
        request_timeout_secs: longest duration of a request in seconds.
        db_path: path of the database.
        seed: random seed of prompts and schedules; the same seed produces the same load.
        request_retention_days: days after which requests of a run are deleted, while the run is kept; 0 for never.
        telemetry_interval_secs: seconds between two readings of a target's accelerators during a measurement.
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
    """One `[[scenarios.capability_probes]]` entry: a task whose answer is stored as an artifact and scored.

    Attributes:
        name: name of the probe.
        prompt: the task.
        max_tokens: maximum tokens of the answer.
        expect: regular expressions; the share of matching expressions is the first score.
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
    """`[scenarios.objectives]`: limits that a good request must meet; None disables a limit.

    Attributes:
        ttft_secs: longest time to first token in seconds.
        tpot_secs: longest time per output token in seconds.
        e2e_secs: longest duration in seconds.
    """

    ttft_secs: Positive | None = 2.0
    tpot_secs: Positive | None = 0.1
    e2e_secs: Positive | None = None


class AgenticSection(config.Section):
    """`[scenarios.agentic]`: conversations like those of coding agents.

    Attributes:
        conversations: number of concurrent conversations; 0 for none.
        turns: number of turns per conversation.
        system_tokens: tokens of the system prompt, which all conversations share.
        tool_tokens: median tokens that a tool result adds to each turn.
        tool_secs: median duration of a tool in seconds.
    """

    conversations: int = Field(default=0, ge=0)
    turns: int = Field(default=25, ge=1)
    system_tokens: int = Field(default=8192, ge=1)
    tool_tokens: int = Field(default=256, ge=1)
    tool_secs: float = Field(default=1.0, ge=0)


class OpenLoopSection(config.Section):
    """`[scenarios.open_loop]`: requests arrive independently of the server's answers.

    Attributes:
        rates: requests per second, ascending; rates above the first saturating rate are skipped.
        arrivals: `poisson` or `constant`.
        duration_secs: seconds per rate.
        prompt_tokens: tokens of each prompt.
    """

    rates: list[Positive] = Field(default_factory=list[float])
    arrivals: Literal["poisson", "constant"] = "poisson"
    duration_secs: Positive = 30.0
    prompt_tokens: int = Field(default=512, ge=1)


class ScenariosSection(config.Section):
    """`[scenarios]`. Empty lists and zeros disable a scenario.

    Attributes:
        prompt_sizes: prompt tokens of single-stream requests, cold and warm.
        decode_depths: tokens in the KV cache before decoding is timed.
        max_tokens: maximum tokens of an answer.
        concurrency_levels: numbers of concurrent requests.
        concurrency_secs: seconds per concurrency level.
        concurrency_prompt_tokens: prompt tokens of each concurrent request.
        open_loop: open-loop load.
        agentic: conversations of agents.
        probe_prompt_tokens: tokens of long prompts that run concurrently with one-token requests; 0 for none.
        cancel: whether to disconnect during an answer and time the release.
        tools: whether to check the correctness of tool calls.
        json_schema: whether to check the correctness of answers with a schema.
        image_sizes: side lengths in pixels of square images, for image models.
        capability_probes: tasks whose answers are scored.
        objectives: limits of good requests.
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
        enabled: whether `run` also serves the results.
        listen: address of the pages and the API.
        root_path: path prefix set by a reverse proxy, for example `/bench`.
    """

    enabled: bool = True
    listen: Listen = Address("127.0.0.1", 13132)
    root_path: str = ""


class AlertsSection(config.Section):
    """`[alerts]`.

    Attributes:
        webhook: URL that receives a JSON object by POST for each alert.
        metrics: metrics to compare.
        extra_samples: number of samples required to confirm an alert.
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
        kind: `neuron`, `cortex`, or `openai` or `anthropic` for any server with this API format.
        endpoint: base URL, without `/v1`.
        label: display name.
        bearer: API key, or None.
        models: models to measure; empty selects all warm models.
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
    """Read the file and the `BENCH_` variables; a relative `db_path` is relative to the file's folder.

    Raises:
        ConfigError: the configuration is invalid; the message is one line.
    """
    settings = config.load(BenchConfig, path, env_prefix=ENV_PREFIX)
    variables.log_unknown_variables(BenchConfig, prefix=ENV_PREFIX)
    if path is not None:
        settings.bench.db_path = path.absolute().parent / settings.bench.db_path
    return settings
