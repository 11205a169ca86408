"""The configuration file neuron.toml: address, models, engine options.

Environment variables with the prefix `NEURON_` override the file, for example `NEURON_PORT` or
`NEURON_HARNESS__TORCH__DEVICE`. `candle` is a former name of `torch`: the table `[harness.candle]` and variables like
`NEURON_HARNESS__CANDLE__DEVICE` still work. If a variable is set under both names, the current name applies.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from helexa.core import environment_variables
from helexa.core.config import FormerSetting, HeaderSecret, Section, load, read_secret
from helexa.core.logs import LogFormat
from helexa.core.node_reports import ModelSpec
from helexa.neuron.cache_folder import expanded
from helexa.neuron.hardware.cpus import NUMA_FOLDER
from helexa.neuron.options import (
    AdmissionOptions,
    CacheOptions,
    ContextLimitOptions,
    DownloadsOptions,
    RecoveryOptions,
    SourceOptions,
    TorchOptions,
)

log = logging.getLogger(__name__)

ENV_PREFIX = "NEURON_"

_SHORT_NAMES = {
    "NEURON_MAX_PROMPT_TOKENS": ("harness", "torch", "context_limit", "max_prompt_tokens"),
    "NEURON_PREFILL_CHUNK_TOKENS": ("harness", "torch", "max_step_tokens"),
    "NEURON_MIN_FREE_VRAM_MB": ("harness", "torch", "context_limit", "min_free_floor_mb"),
    "NEURON_TP_STEP_TIMEOUT_S": ("recovery", "step_timeout_secs"),
}

_CANDLE = ("harness", "candle")  # table of the engine in helexa's first version
_NO_IMAGES = "helexa generates no images"
_FORMER_SETTINGS = (
    FormerSetting((*_CANDLE, "prefix_cache", "enabled"), (*_CANDLE, "prefix_reuse"), lambda on: None if on else "off"),
    FormerSetting((*_CANDLE, "prefix_cache", "budget_mb"), (*_CANDLE, "snapshot_mb")),
    FormerSetting((*_CANDLE, "prefix_cache", "max_entries"), reason="snapshot_mb is the only limit"),
    FormerSetting((*_CANDLE, "image"), reason=_NO_IMAGES),
)
_ALWAYS = "the engine decides this itself"
_RETIRED_VARIABLES = {
    "NEURON_USE_CHAT_TEMPLATE": "the model's chat template is always used",
    "NEURON_GDN_CHUNKED": _ALWAYS,
    "NEURON_FLASH_ATTN": _ALWAYS,
    "NEURON_MOE_FUSED": _ALWAYS,
    "NEURON_BATCHING": "to run one request at a time, set harness.torch.max_sequences = 1",
    "NEURON_MROPE": "the model's configuration decides",
    "NEURON_VISION_LEGACY_POS": "",
    "NEURON_VISION_LEGACY_ROPE": "",
    "NEURON_VISION_MIN_PIXELS": "the model's configuration decides",
    "NEURON_VISION_MAX_PIXELS": "the model's configuration decides",
    "NEURON_VISION_PREFILL_BASE_MB": "the memory of images is measured",
    "NEURON_VISION_PREFILL_MB_PER_1K_TOKENS": "the memory of images is measured",
    "NEURON_TP_ABORT_DEADLINE_S": "recovery.step_timeout_secs limits hangs",
    "NEURON_REF_MODEL_PATH": "",
    "NEURON_DEBUG_POISON": "only tests inject faults, without a variable",
}

HarnessName = Annotated[Literal["torch"], BeforeValidator(lambda name: "torch" if name == "candle" else name)]


class DefaultModel(ModelSpec):
    """In neuron.toml: a model to load at start, with fields of a load request."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    # File with a Jinja template that replaces the chat templates in the model's files, in each load of the model. A
    # relative path is relative to the folder of neuron.toml. A load request cannot name a file of the node, because
    # clients could then read the file.
    chat_template: Path | None = None


class CacheConfig(Section, CacheOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """In neuron.toml: the cache folder for models, packed weights and kernels."""


class DownloadsConfig(Section, DownloadsOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """In neuron.toml: options for downloading model files from hubs."""


class LogConfig(Section):
    """In neuron.toml: the log on stderr, which `$HELEXA_LOG` overrides."""

    # Lowest severity that is logged. With `debug`, the polling requests of gateways are logged as well.
    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    format: LogFormat = "text"  # `text` for plain lines, `json` for JSON objects
    # Whether to log the text of all prompts, after the chat template. Prompts are private data of clients.
    prompts: bool = False


class SourceConfig(Section, SourceOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """Options of one model hub."""


class AdmissionConfig(Section, AdmissionOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """In neuron.toml: limits on running and waiting requests of each model."""


class ContextLimitConfig(Section, ContextLimitOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """In neuron.toml: further limits on the context length of models."""


class TorchConfig(Section, TorchOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """In neuron.toml: options of sources and the engine (see `EngineOptions`)."""

    sources: dict[str, SourceConfig] = Field(default_factory=dict[str, SourceConfig])  # type: ignore[assignment]
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)  # type: ignore[assignment]
    context_limit: ContextLimitConfig = Field(default_factory=ContextLimitConfig)  # type: ignore[assignment]


class RecoveryConfig(Section, RecoveryOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """In neuron.toml: timeouts of hung engines, and limits on restarts."""


class GroupConfig(Section):
    """In neuron.toml: a host group, whose hosts compute models together.

    The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT provide the first four options if they are
    not set.
    """

    rank: int | None = None  # number of this host, from 0. Host 0 runs the node's server.
    world_size: int | None = None  # number of hosts
    master_addr: str | None = None  # address of host 0
    master_port: int | None = None  # port at which every host accepts connections of the group. Default: 29500.
    # This host's address in the private network that connects the hosts, or the name of its network interface.
    # Required, because connections between the hosts are authenticated but not encrypted.
    interface: str | None = None
    secret_file: Path | None = None  # path of a file with the secret that all hosts share. Required.
    # maximum time that a load waits for hosts that are not connected, in seconds
    join_timeout_secs: float = Field(default=120.0, ge=0)


class ResponsesConfig(Section):
    """In neuron.toml: limits of the memory for responses of `/v1/responses`."""

    # maximum size of all stored responses together, in MiB; 0 stores no responses
    store_mb: int = Field(default=64, ge=0)
    store_entries: int = Field(default=10_000, ge=1)  # maximum number of stored responses
    store_secs: float = Field(default=86_400.0, gt=0)  # lifetime of a stored response, in seconds


class HarnessTables(Section):
    """The tables `[harness.NAME]`; `candle` is a former name of `torch`."""

    torch: TorchConfig = Field(default_factory=TorchConfig, validation_alias=AliasChoices("torch", "candle"))


class HarnessEntry(Section):
    """An entry of the list `[[harnesses]]`; only `torch` exists."""

    name: HarnessName


class NeuronConfig(Section):
    """All settings of neuron.toml."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = Field(default=13131, ge=1, le=65535)
    # Key that every request except `GET /health` and `GET /health/ready` must have in the header `Authorization: Bearer
    # KEY`. By default, no key is required.
    api_key: HeaderSecret | None = None
    # Path of a file with the `api_key`. A relative path is relative to the folder of neuron.toml. The node does not
    # read the file if `api_key` is set.
    api_key_file: Path | None = None
    # Additional names that requests may have in the `Host` header. IP addresses, localhost, the machine's name and
    # `host` are always permitted. The check prevents attacks by DNS rebinding. Without `api_key`, the node checks all
    # requests if `host` is a loopback address, else only requests from browsers. With `api_key`, it checks none.
    allowed_hosts: list[str] = Field(default_factory=list[str])
    # Folders with models, besides the caches: GGUF files and safetensors checkpoints, which may be in subfolders. A
    # relative path is relative to the folder of neuron.toml.
    models_dirs: list[Path] = Field(default_factory=list[Path])
    # whether the node reports the models in its caches and in `models_dirs` to clients such as a gateway (`GET
    # /models/local`)
    local_models: bool = True
    # At SIGTERM, longest wait in seconds for running requests to end. The node rejects new requests during this time.
    drain_secs: float = Field(default=5.0, ge=0)
    default_models: list[DefaultModel] = Field(default_factory=list[DefaultModel])
    harnesses: list[HarnessEntry] = Field(default_factory=lambda: [HarnessEntry(name="torch")])
    harness: HarnessTables = Field(default_factory=HarnessTables)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    downloads: DownloadsConfig = Field(default_factory=DownloadsConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    group: GroupConfig | None = None
    responses: ResponsesConfig = Field(default_factory=ResponsesConfig)


def read_config(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    warn: Callable[[str], None] = log.warning,
    flags: Mapping[environment_variables.Keys, tuple[str, Any]] | None = None,
    origins: dict[environment_variables.Keys, str] | None = None,
) -> NeuronConfig:
    """Read the configuration from `path`, if not None, and environment variables.

    Args:
        environ: the environment variables. None means `os.environ`.
        warn: function that is called with a line of text for each outdated setting of helexa's first version.
        flags: name and value of a command line option for each path of a configuration key.
        origins: a dictionary to fill with the origins of the values (see `helexa.core.config.load`).

    Raises:
        ConfigError: an option is invalid, or `api_key_file` cannot be read. The message is one line that names the
            option.
    """
    warnings: list[str] = []
    config = load(
        NeuronConfig,
        path,
        env_prefix=ENV_PREFIX,
        short_names=_SHORT_NAMES,
        former=_FORMER_SETTINGS,
        retired=_RETIRED_VARIABLES,
        environ=environ,
        flags=flags,
        warn=warnings.append,
        origins=origins,
    )
    if warnings and "host" not in config.model_fields_set:
        warnings.append(
            f"{path or 'environment'}: the node listens on {config.host}, and the first helexa listened on 0.0.0.0: if "
            "the gateway runs on another machine, set host, and api_key_file; see docs/migration.md"
        )
    for warning in warnings:
        warn(warning)
    folder = Path() if path is None else path.absolute().parent
    config.models_dirs = [(folder / expanded(models_dir)).absolute() for models_dir in config.models_dirs]
    for model in config.default_models:
        if model.chat_template is not None:
            model.chat_template = (folder / expanded(model.chat_template)).absolute()
    if config.api_key is None and config.api_key_file is not None:
        config.api_key = read_secret(folder / config.api_key_file, "api_key_file")
    return config


def log_unknown_variables() -> None:
    """Log the names of `NEURON_` variables that have no effect."""
    former = (environment_variables.variable_name(ENV_PREFIX, setting.keys) for setting in _FORMER_SETTINGS)
    others = (NUMA_FOLDER, *_RETIRED_VARIABLES, *former)
    environment_variables.log_unknown_variables(NeuronConfig, prefix=ENV_PREFIX, short=_SHORT_NAMES, other_names=others)


def exposure(config: NeuronConfig) -> str | None:
    """Return a warning if other machines can use the node without a key, else None."""
    from helexa.core.address import is_loopback  # slow to import, and not needed by private engines

    if config.api_key is not None or is_loopback(config.host):
        return None
    return (
        f"other machines can connect to {config.host or '0.0.0.0'}:{config.port} and run prompts, read the list of "
        "models, and load and unload models without a key; set api_key (and bearer for this node in cortex.toml), or "
        'host = "127.0.0.1"'
    )
