"""The configuration file neuron.toml: address to listen on, models to load at start, and engine options.

Environment variables with the prefix `NEURON_` override the file, for example `NEURON_PORT` or
`NEURON_HARNESS__TORCH__DEVICE`. `candle` is a former name of `torch`: the table `[harness.candle]` and variables like
`NEURON_HARNESS__CANDLE__DEVICE` still work. If a variable is set under both names, the current name applies.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from helexa.core import variables
from helexa.core.config import HeaderSecret, Section, load, read_secret
from helexa.core.fleet import ModelSpec
from helexa.core.former_settings import FormerSetting
from helexa.core.logs import LogFormat
from helexa.core.source import DEFAULT_SCHEME
from helexa.neuron.engine.ipc.messages import (
    DEBUG_FAULT,
    PLAN_LOG,
    Activations,
    EngineOptions,
    PrefixReuse,
    StepTiming,
    TensorParallelMode,
)
from helexa.neuron.hardware.numa import NUMA_FOLDER
from helexa.neuron.ops.constants import MAX_RANKS, Kernels

log = logging.getLogger(__name__)

ENV_PREFIX = "NEURON_"
MOST_DOWNLOADS = 64

_SHORT_NAMES = {
    "NEURON_MAX_PROMPT_TOKENS": ("harness", "torch", "context_limit", "max_prompt_tokens"),
    "NEURON_PREFILL_CHUNK_TOKENS": ("harness", "torch", "max_step_tokens"),
    "NEURON_MIN_FREE_VRAM_MB": ("harness", "torch", "context_limit", "min_free_floor_mb"),
    "NEURON_TP_STEP_TIMEOUT_S": ("recovery", "step_timeout_secs"),
}

_CANDLE = ("harness", "candle")  # the engine of the first helexa
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
    "NEURON_DEBUG_POISON": "NEURON_DEBUG_FAULT injects faults",
}

HarnessName = Annotated[Literal["torch"], BeforeValidator(lambda name: "torch" if name == "candle" else name)]


class DefaultModel(ModelSpec):
    """A model that the node loads when it starts. The fields are those of a load request. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CacheConfig(Section):
    """Options of the cache folder, which contains downloaded models, packed weights and compiled kernels.

    Attributes:
        dir: path of the folder. Default: `$HELEXA_CACHE`, else `$XDG_CACHE_HOME/helexa`, else `~/.cache/helexa`.
    """

    dir: Path | None = None


class DownloadsConfig(Section):
    """Options for downloading model files from hubs.

    Attributes:
        max_concurrent: maximum number of concurrent downloads. Default: `$HELEXA_MAX_CONCURRENT_DOWNLOADS`, else 8.
        stall_secs: seconds without data after which a connection is treated as broken.
    """

    max_concurrent: int | None = Field(default=None, ge=1, le=MOST_DOWNLOADS)
    stall_secs: float = Field(default=30.0, ge=0.1, le=3600)


class LogConfig(Section):
    """Options of the log, which is written to stderr. `$HELEXA_LOG` and `$HELEXA_LOG_FORMAT` override them.

    Attributes:
        level: lowest severity that is logged. With `debug`, the polling requests of gateways are logged as well.
        format: `text` for plain lines, `json` for JSON objects.
        prompts: whether to log the text of all prompts, after the chat template. Prompts are private data of clients.
    """

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    format: LogFormat = "text"
    prompts: bool = False


class SourceConfig(Section):
    """Options of one model hub.

    Attributes:
        endpoint: base URL of the hub.
        auth_env: name of the environment variable that contains the access token.
        cache_dir: folder for files downloaded from the hub.
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    auth_env: str | None = None
    cache_dir: Path | None = None


class AdmissionConfig(Section):
    """Limits on running and waiting requests. They apply to each loaded model separately.

    Attributes:
        max_in_flight: maximum number of requests in the running batch. Default and upper bound: the engine option
            `max_sequences`.
        max_queue_depth: maximum number of requests that wait for a slot in the running batch.
        max_wait_secs: maximum wait for a slot, in seconds.
        max_per_principal: maximum number of running and waiting requests of one principal (API key owner); 0 for no
            limit. Principals get fair shares of the slots in either case.
        anon_max_in_flight: maximum number of running requests without a principal; 0 rejects all of them. Default: all
            slots, or all slots except one if there are at least eight.
        anon_max_pending: maximum number of running and waiting requests without a principal. Default:
            `max_in_flight + max_queue_depth - 1`.
        kv_max_wait_secs: maximum wait for KV cache memory, in seconds. A request that is next in line for a free slot
            waits if the KV cache lacks memory for it.
    """

    max_in_flight: int | None = Field(default=None, ge=1)
    max_queue_depth: int = Field(default=256, ge=0)
    max_wait_secs: float = Field(default=30.0, ge=0)
    max_per_principal: int = Field(default=0, ge=0)
    anon_max_in_flight: int | None = Field(default=None, ge=0)
    anon_max_pending: int | None = Field(default=None, ge=0)
    kv_max_wait_secs: float = Field(default=240.0, ge=0)


class ContextLimitConfig(Section):
    """Additional limits on the context length of models. A model's training and its KV cache always limit it.

    Attributes:
        enabled: whether the measured prefill rate limits the context length.
        target_prefill_latency_secs: maximum time for the prefill of a full context, in seconds. Default: 120, or 600 on
            a CPU.
        bootstrap_prefill_tok_per_sec: prefill rate, in prompt tokens per second, that is assumed before the first
            measurement. Default: 800, or 100 on a CPU.
        activation_headroom_mb: memory that models leave free for unforeseen allocations, in MiB.
        min_free_floor_mb: memory that models leave free for other processes, in MiB.
        output_reserve_tokens: number of tokens to reserve for the output, at most a quarter of the context limit.
            A model's prompt limit (`limit.input`) is its context limit minus this reserve.
        default_output_tokens: output limit of requests that set no limit. 0: only the context length limits the output.
        max_prompt_tokens: maximum context length of all models, in tokens; 0 for no limit. The environment variable
            `NEURON_MAX_PROMPT_TOKENS` also sets this option.
    """

    enabled: bool = True
    target_prefill_latency_secs: float | None = Field(default=None, gt=0)
    bootstrap_prefill_tok_per_sec: float | None = Field(default=None, gt=0)
    activation_headroom_mb: int = Field(default=256, ge=0)
    min_free_floor_mb: int = Field(default=512, ge=0)
    output_reserve_tokens: int = Field(default=8192, ge=1)
    default_output_tokens: int = Field(default=0, ge=0)
    max_prompt_tokens: int = Field(default=0, ge=0)


class TorchConfig(Section):
    """Options of model sources and the inference engine. `EngineOptions` documents the fields not listed here.

    Attributes:
        default_source: scheme of the source for model ids without a scheme.
        sources: options of each model hub, by scheme.
        device: torch name of the device on which models run. `auto` selects the CUDA device with the most memory, or
            the CPU if there is no CUDA device.
        max_step_tokens: maximum number of tokens in one engine step (forward pass). Default: 512, or 2048 on a CUDA
            device.
        max_prefill_beside_decode: maximum number of prefill tokens in a step that also decodes other sequences.
            Default: 128, or 2048 on a CUDA device. The engine uses fewer tokens if such a step would take too long.
        tensor_parallel: default number of processes (ranks) that compute a model together. A load request may set
            another number. The ranks run on CPUs, or each on its own CUDA device.
        max_image_tokens: maximum number of tokens of an image. Larger images are shrunk. A load request may set another
            number. Default: 1024, or 4096 on a CUDA device.
        pipeline_parallel: default number of hosts of the group that compute a model together. A load request may set
            another number. Default: all hosts.
    """

    default_source: str = Field(default=DEFAULT_SCHEME, pattern=r"^[a-z][a-z0-9_-]*$")
    hf_cache: Path | None = None
    sources: dict[str, SourceConfig] = Field(default_factory=dict[str, SourceConfig])
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kernels: Kernels = "auto"
    threads: int = Field(default=0, ge=0)
    max_step_tokens: int | None = Field(default=None, ge=1)
    max_prefill_beside_decode: int | None = Field(default=None, ge=0)
    max_sequences: int = Field(default=64, ge=1)
    context_length: int = Field(default=0, ge=0)
    kv_cache_mb: int = Field(default=0, ge=0)
    memory_limit_mb: int = Field(default=0, ge=0)
    snapshot_mb: int = Field(default=0, ge=0)
    activations: Activations = "auto"
    kv_dtype: Literal["auto", "int8"] = "auto"
    prefix_reuse: PrefixReuse = "principal"
    speculation: bool = True
    speculation_max_sequences: int = Field(default=4, ge=0)
    graphs: bool = True
    overlap: bool | None = None
    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    tensor_parallel_mode: TensorParallelMode = "auto"
    pipeline_parallel: int | None = Field(default=None, ge=1)
    max_image_tokens: int | None = Field(default=None, ge=16, le=1 << 16)
    image_cache_mb: int = Field(default=256, ge=1)
    step_timing: StepTiming = "measured"
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    context_limit: ContextLimitConfig = Field(default_factory=ContextLimitConfig)

    def engine_options(self, device: str) -> EngineOptions:
        """Return the options for an engine on the torch device `device`, with device-dependent defaults filled in."""
        cuda = device.startswith("cuda")
        step, prefill_beside_decode = (2048, 2048) if cuda else (512, 128)
        defaults = {
            "device": device,
            "max_image_tokens": self.max_image_tokens or (4096 if cuda else 1024),
            "pipeline_parallel": self.pipeline_parallel or 1,
            "max_step_tokens": step if self.max_step_tokens is None else self.max_step_tokens,
            "max_prefill_beside_decode": (
                prefill_beside_decode if self.max_prefill_beside_decode is None else self.max_prefill_beside_decode
            ),
        }
        options = msgspec.convert(self.model_copy(update=defaults), EngineOptions, from_attributes=True)
        # admission control never sends more requests than can run
        return msgspec.structs.replace(options, max_waiting=self.max_sequences)


class RecoveryConfig(Section):
    """Timeouts after which an engine is treated as hung, and limits on restarts of crashed or hung engines.

    Attributes:
        step_timeout_secs: seconds without progress after which an engine with running requests is treated as hung. In
            steps whose duration the engine can predict, the limit is usually shorter, at least 5 seconds.
        load_timeout_secs: seconds without progress after which an engine that loads a model is treated as hung.
        max_restarts: maximum number of restarts of one model's engine within `restart_window_secs` seconds. After one
            more crash, the model is quarantined (status `poisoned`) and rejects requests.
    """

    step_timeout_secs: float = Field(default=120.0, ge=0.1)
    load_timeout_secs: float = Field(default=600.0, ge=0.1)
    max_restarts: int = Field(default=3, ge=0)
    restart_window_secs: float = Field(default=600.0, gt=0)


class GroupConfig(Section):
    """Options of a host group: several hosts that compute models together (pipeline parallelism).

    The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT provide the first four options if they are
    not set.

    Attributes:
        rank: number of this host, from 0. Host 0 runs the node's server.
        world_size: number of hosts.
        master_addr: address of host 0.
        master_port: port at which every host accepts connections of the group. Default: 29500.
        interface: this host's address in the private network that connects the hosts, or the name of its network
            interface. Required, because connections between the hosts are authenticated but not encrypted.
        secret_file: path of a file with the secret that all hosts share. Required.
        join_timeout_secs: maximum time that a load waits for hosts that are not connected, in seconds.
    """

    rank: int | None = None
    world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    interface: str | None = None
    secret_file: Path | None = None
    join_timeout_secs: float = Field(default=120.0, ge=0)


class ResponsesConfig(Section):
    """Limits of the memory in which the node stores responses of `/v1/responses` for `previous_response_id`.

    Attributes:
        store_mb: maximum size of all stored responses together, in MiB; 0 stores no responses.
        store_entries: maximum number of stored responses.
        store_secs: lifetime of a stored response, in seconds.
    """

    store_mb: int = Field(default=64, ge=0)
    store_entries: int = Field(default=10_000, ge=1)
    store_secs: float = Field(default=86_400.0, gt=0)


class HarnessTables(Section):
    """The tables `[harness.NAME]` of neuron.toml, with engine options. `candle` is a former name of `torch`."""

    torch: TorchConfig = Field(default_factory=TorchConfig, validation_alias=AliasChoices("torch", "candle"))


class HarnessEntry(Section):
    """An entry of the list `[[harnesses]]` in neuron.toml, which names an inference engine. Only `torch` exists."""

    name: HarnessName


class NeuronConfig(Section):
    """All settings of neuron.toml.

    Attributes:
        host: address to listen on.
        api_key: key that every request except `GET /health` and `GET /health/ready` must have in the header
            `Authorization: Bearer KEY`. By default, no key is required.
        api_key_file: path of a file with the `api_key`. A relative path is relative to the folder of neuron.toml. The
            node does not read the file if `api_key` is set.
        allowed_hosts: additional names that requests may have in the `Host` header. IP addresses, localhost, the
            machine's name and `host` are always permitted. The check prevents attacks by DNS rebinding. Without
            `api_key`, the node checks all requests if `host` is a loopback address, else only requests from browsers.
            With `api_key`, it checks none.
        drain_secs: at SIGTERM, longest wait in seconds for running requests to end. The node rejects new requests
            during this time.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=13131, ge=1, le=65535)
    api_key: HeaderSecret | None = None
    api_key_file: Path | None = None
    allowed_hosts: list[str] = Field(default_factory=list[str])
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
    flags: Mapping[variables.Keys, tuple[str, Any]] | None = None,
    origins: dict[variables.Keys, str] | None = None,
) -> NeuronConfig:
    """Read the configuration from the file `path` and from environment variables. Without a file, defaults apply.

    Args:
        path: path of neuron.toml, or None.
        environ: the environment variables. None means `os.environ`.
        warn: function that gets lines about settings of the first helexa, if there are any.
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
    if config.api_key is None and config.api_key_file is not None:
        folder = Path() if path is None else path.absolute().parent
        config.api_key = read_secret(folder / config.api_key_file, "api_key_file")
    return config


def log_unknown_variables() -> None:
    """Log one line with the names of the `NEURON_` environment variables that match no option and have no effect."""
    former = (variables.variable_name(ENV_PREFIX, setting.keys) for setting in _FORMER_SETTINGS)
    others = (DEBUG_FAULT, NUMA_FOLDER, PLAN_LOG, *_RETIRED_VARIABLES, *former)
    variables.log_unknown_variables(NeuronConfig, prefix=ENV_PREFIX, short=_SHORT_NAMES, other_names=others)
