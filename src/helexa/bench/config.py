"""The configuration file `helexa-bench.toml`: its types, and where it is."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from helexa.bench.host_build_and_model import TargetKind
from helexa.core import config, environment_variables
from helexa.core.address import Address, Listen, base_url

ENV_PREFIX = "BENCH_"
_PLACES = (Path("helexa-bench.toml"), Path("/etc/helexa-bench/helexa-bench.toml"))
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
Positive = Annotated[float, Field(gt=0)]


def _server(text: str) -> str:
    return base_url(text).removesuffix("/v1")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"'{text}' is not a valid name; use at most 64 letters, digits, '.', '_' and '-'")
    return text


BaseUrl = Annotated[str, AfterValidator(_server)]
ConsoleUrl = Annotated[str, AfterValidator(base_url)]
Name = Annotated[str, AfterValidator(_name)]


def _state_folder() -> Path:
    systemd = os.environ.get("STATE_DIRECTORY")
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(systemd.split(":")[0]) if systemd else home / "helexa-bench"


class BenchSection(config.Section):
    """The section `[bench]`: what is measured how often, and where results are stored.

    A benchmark configuration is a target, its host and build, a model and a scenario. A sample is one execution of a
    scenario.
    """

    # seconds from the start of one sweep over all targets to the start of the next
    sweep_interval_secs: Positive = 1800.0
    # Number of valid samples that are taken of each benchmark configuration. A comparison of builds needs 5 or more.
    samples_per_version: int = Field(default=5, ge=1)
    iteration_pause_secs: float = Field(default=2.0, ge=0)  # pause between two samples, in seconds
    request_timeout_secs: Positive = 600.0  # longest duration of a request, in seconds
    db_path: Path = Field(default_factory=lambda: _state_folder() / "bench.sqlite")  # path of the database
    # Random seed of prompts and arrival times. The same seed produces the same load.
    seed: int = Field(default=0, ge=0)
    # Days after which data on single requests is deleted. Summaries of samples are not deleted. 0 keeps everything.
    request_retention_days: int = Field(default=90, ge=0)
    # seconds between two readings of GPU memory, utilization and temperature during a sample
    telemetry_interval_secs: Positive = 1.0


class CapabilityProbe(config.Section):
    """An entry of `[[scenarios.capability_probes]]`: a prompt to score."""

    name: Name
    prompt: str = Field(min_length=1)
    max_tokens: int = Field(default=2048, ge=1)  # maximum number of tokens of the response
    # Regular expressions. The score is the share of expressions that match the response.
    expect: list[str] = Field(default_factory=list[str])

    @model_validator(mode="after")
    def _check(self) -> Self:
        for pattern in self.expect:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"expect: {pattern!r} is not a valid regular expression: {error}; correct the pattern"
                ) from None
        return self


class ObjectivesSection(config.Section):
    """The section `[scenarios.objectives]`: latency limits for goodput.

    None disables a limit.
    """

    ttft_secs: Positive | None = 2.0  # longest time to first token, in seconds
    tpot_secs: Positive | None = 0.1  # longest time per output token, in seconds
    e2e_secs: Positive | None = None  # longest time to the last token, in seconds


class AgenticSection(config.Section):
    """The section `[scenarios.agentic]`: conversations that imitate coding agents.

    A turn is one request of a conversation.
    """

    conversations: int = Field(default=0, ge=0)  # number of concurrent conversations. 0 disables the scenario.
    turns: int = Field(default=25, ge=1)  # number of requests per conversation
    system_tokens: int = Field(default=8192, ge=1)  # tokens of the system prompt, which all conversations share
    # median number of tokens that a tool result adds to the prompt after each response
    tool_tokens: int = Field(default=256, ge=1)
    tool_secs: float = Field(default=1.0, ge=0)  # median time that a tool takes between two requests, in seconds


class OpenLoopSection(config.Section):
    """The section `[scenarios.open_loop]`: requests at given times."""

    # Request rates to measure, in requests per second. If a rate saturates the server, higher rates are skipped.
    rates: list[Positive] = Field(default_factory=list[float])
    # `poisson` for random intervals between requests, `constant` for equal intervals
    arrivals: Literal["poisson", "constant"] = "poisson"
    duration_secs: Positive = 30.0  # seconds for which each rate is measured
    prompt_tokens: int = Field(default=512, ge=1)


class ScenariosSection(config.Section):
    """The section `[scenarios]`: which scenarios are measured.

    Empty lists and zeros disable a scenario.
    """

    # Prompt sizes in tokens for single requests. Each size is measured without and with a prefix cache hit.
    prompt_sizes: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [128, 4096])
    # context lengths (tokens in the KV cache) at which the decode rate is measured
    decode_depths: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list[int])
    max_tokens: int = Field(default=256, ge=2)  # maximum number of tokens of a response
    # numbers of concurrent requests to measure
    concurrency_levels: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list[int])
    concurrency_secs: Positive = 30.0  # seconds for which each concurrency level is measured
    concurrency_prompt_tokens: int = Field(default=512, ge=1)  # tokens of each concurrent request's prompt
    open_loop: OpenLoopSection = Field(default_factory=OpenLoopSection)  # requests at fixed rates
    agentic: AgenticSection = Field(default_factory=AgenticSection)  # conversations that imitate coding agents
    # Prompt size in tokens of the long requests of the scenario `mixed`. While the server processes long requests, the
    # scenario measures the latency of one-token requests. 0 disables the scenario.
    probe_prompt_tokens: int = Field(default=0, ge=0)
    cancel: bool = False  # True to measure how fast the server releases a request after the client disconnects
    tools: bool = False  # True to check whether tool calls are correct
    json_schema: bool = False  # True to check whether responses with a JSON Schema are correct
    # side lengths of square images in pixels, for models that generate images
    image_sizes: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [1024])
    # prompts whose responses are stored and scored
    capability_probes: list[CapabilityProbe] = Field(default_factory=list[CapabilityProbe])
    objectives: ObjectivesSection = Field(default_factory=ObjectivesSection)  # latency limits for goodput


class ApiSection(config.Section):
    """The section `[api]`: the web server for pages and API."""

    enabled: bool = True  # True to serve the results also during `helexa-bench run`
    listen: Listen = Address("127.0.0.1", 13132)  # address on which pages and API are served
    root_path: str = ""  # path prefix set by a reverse proxy, for example `/bench`
    console_url: ConsoleUrl | None = None  # URL of a gateway's console, which the pages link to. None for no link.


class AlertsSection(config.Section):
    """The section `[alerts]`: detection of performance changes between builds."""

    webhook: SecretStr | None = None  # URL that receives a JSON object by POST for each confirmed regression
    # names of the metrics to compare
    metrics: list[str] = Field(default_factory=lambda: ["ttft_s", "tpot_s", "output_tps", "prefill_tps", "load_s"])
    # number of additional samples that are required to confirm a suspected change
    extra_samples: int = Field(default=3, ge=0)
    min_effect: float = Field(default=0.03, ge=0)  # smallest relative change that is reported, for example 0.03 for 3 %


class TargetSection(config.Section):
    """An entry of `[[targets]]`: a server to measure."""

    name: Name  # unique name of the target
    # `neuron` or `cortex` for servers of helexa, `openai` or `anthropic` for other servers with these API formats
    kind: TargetKind = "neuron"
    endpoint: BaseUrl  # base URL, without `/v1`
    label: str = ""  # display name
    bearer: SecretStr | None = None  # API key, or None
    # Names of the models to measure. If empty, all loaded models are measured.
    models: list[str] = Field(default_factory=list[str])


class BenchConfig(config.Section):
    """The contents of the configuration file `helexa-bench.toml`."""

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
                raise ValueError(f"two targets are named '{name}'; rename one of them")
        return self


def load(path: Path | None) -> BenchConfig:
    """Return the configuration from the file at `path` and `BENCH_` variables.

    If `path` is None, there is no file. A relative `db_path` is resolved against the file's folder.

    Raises:
        ConfigError: the configuration is invalid. The message is one line.
    """
    settings = config.load(BenchConfig, path, env_prefix=ENV_PREFIX)
    environment_variables.log_unknown_variables(BenchConfig, prefix=ENV_PREFIX)
    if path is not None:
        settings.bench.db_path = path.absolute().parent / settings.bench.db_path
    return settings


def find_config(path: Path | None) -> Path | None:
    """Return the path of the configuration file, or None if there is no file.

    The result is `path` if given, even if the file is missing. Otherwise, the result is `./helexa-bench.toml` if it
    exists, or else the system-wide file if it exists.
    """
    return path or next((place for place in _PLACES if place.exists()), None)


def read_config(path: Path | None) -> BenchConfig:
    """Return the configuration from `path`, a default location or built-in defaults.

    Raises:
        ConfigError: the configuration is invalid. The message is one line.
    """
    return load(find_config(path))
