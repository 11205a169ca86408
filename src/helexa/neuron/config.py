"""neuron.toml: the address to listen on, the models to load at start, and engine options.

Variables that start with `NEURON_` override the file: `NEURON_PORT`, `NEURON_HARNESS__TORCH__DEVICE`.
`[harness.candle]` and `NEURON_HARNESS__CANDLE__...` are former names of `[harness.torch]` and
`NEURON_HARNESS__TORCH__...`. If variables of both names set one key, the current name wins.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, SecretStr

from helexa.core import variables
from helexa.core.config import Section, load
from helexa.core.fleet import ModelSpec
from helexa.core.logs import LogFormat
from helexa.core.source import DEFAULT_SCHEME
from helexa.neuron.engine.ipc.messages import DEBUG_FAULT, PLAN_LOG, Activations, EngineOptions, PrefixReuse, StepTiming
from helexa.neuron.ops.constants import Kernels

ENV_PREFIX = "NEURON_"
MOST_DOWNLOADS = 64

_SHORT_NAMES = {"NEURON_MAX_PROMPT_TOKENS": ("harness", "torch", "context_limit", "max_prompt_tokens")}

HarnessName = Annotated[Literal["torch"], BeforeValidator(lambda name: "torch" if name == "candle" else name)]


class DefaultModel(ModelSpec):
    """A model to load at start. It has the fields of a load request; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CacheConfig(Section):
    """The folder of models, packed weights and compiled kernels.

    Attributes:
        dir: path of the folder. Unset: `$HELEXA_CACHE`, else `$XDG_CACHE_HOME/helexa`.
    """

    dir: Path | None = None


class DownloadsConfig(Section):
    """Downloads of model files from hubs.

    Attributes:
        max_concurrent: number of concurrent downloads. Unset: `$HELEXA_MAX_CONCURRENT_DOWNLOADS`, else 8.
        stall_secs: seconds without data after which a connection counts as broken.
    """

    max_concurrent: int | None = Field(default=None, ge=1, le=MOST_DOWNLOADS)
    stall_secs: float = Field(default=30.0, ge=0.1, le=3600)


class LogConfig(Section):
    """Logging to stderr. `$HELEXA_LOG` and `$HELEXA_LOG_FORMAT` override these settings.

    Attributes:
        level: lowest severity that is logged. `debug` includes the polling requests of gateways.
        format: `text` for plain lines, `json` for JSON objects.
    """

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    format: LogFormat = "text"


class SourceConfig(Section):
    """A model hub.

    Attributes:
        endpoint: base URL of the hub.
        auth_env: environment variable that holds the access token.
        cache_dir: folder of files downloaded from the hub.
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    auth_env: str | None = None
    cache_dir: Path | None = None


class AdmissionConfig(Section):
    """Limits of running and waiting requests. Each loaded model has its own limits.

    Attributes:
        max_in_flight: largest number of requests in the batch. Unset or larger than the engine's `max_sequences`:
            `max_sequences`.
        max_queue_depth: largest number of requests that wait for a slot in the batch.
        max_wait_secs: longest wait for a slot, in seconds.
        max_per_principal: largest number of running and waiting requests of one principal (client of the gateway); 0
            for no limit. With and without this limit, principals get fair shares of the slots.
        anon_max_in_flight: largest number of running requests without a principal; 0 rejects these requests. Unset: all
            slots, or all slots but one if there are at least eight.
        anon_max_pending: largest number of running and waiting requests without a principal. Unset: the largest number
            of running and waiting requests together, minus one.
        kv_max_wait_secs: longest wait for KV cache memory, in seconds, after a request has reached the front of the
            queue.
    """

    max_in_flight: int | None = Field(default=None, ge=1)
    max_queue_depth: int = Field(default=256, ge=0)
    max_wait_secs: float = Field(default=30.0, ge=0)
    max_per_principal: int = Field(default=0, ge=0)
    anon_max_in_flight: int | None = Field(default=None, ge=0)
    anon_max_pending: int | None = Field(default=None, ge=0)
    kv_max_wait_secs: float = Field(default=240.0, ge=0)


class ContextLimitConfig(Section):
    """Limits of a model's context length, below the trained context length and the KV cache size.

    Attributes:
        enabled: limit the context also by the time that the prefill of a full context takes.
        target_prefill_latency_secs: longest time to the first token of a prompt, in seconds. Unset: 120, or 600 on a
            CPU.
        bootstrap_prefill_tok_per_sec: prompt tokens per second that are assumed until a measurement exists. Unset: 800,
            or 100 on a CPU.
        activation_headroom_mb: memory that models leave free for unforeseen allocations, in MiB.
        min_free_floor_mb: memory that models leave free for other processes, in MiB.
        output_reserve_tokens: tokens of the context that `limit.input` leaves for the answer; at most a quarter of the
            context.
        default_output_tokens: output limit of requests that state no limit; 0 for the rest of the context.
        max_prompt_tokens: longest context of any model, in tokens; 0 for no limit. `NEURON_MAX_PROMPT_TOKENS` sets it.
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
    """Options of the inference engine. `EngineOptions` documents the fields that are not listed here.

    Attributes:
        default_source: source scheme of model ids without a scheme.
        sources: hubs by scheme.
        device: device of all models. `auto` is the CUDA device with the most memory, or the CPU if there is no CUDA
            device.
        max_step_tokens: largest number of tokens per engine step. Unset: 512, or 2048 on a CUDA device.
        max_prefill_beside_decode: largest number of prefill tokens in a step that also decodes other sequences. Unset:
            128, or 2048 on a CUDA device. On a CUDA device, the measured prefill time limits the number further.
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
    step_timing: StepTiming = "measured"
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    context_limit: ContextLimitConfig = Field(default_factory=ContextLimitConfig)

    def engine_options(self, device: str) -> EngineOptions:
        """Return the options of an engine that runs on `device`."""
        step, prefill_beside_decode = (2048, 2048) if device.startswith("cuda") else (512, 128)
        defaults = {
            "device": device,
            "max_step_tokens": step if self.max_step_tokens is None else self.max_step_tokens,
            "max_prefill_beside_decode": (
                prefill_beside_decode if self.max_prefill_beside_decode is None else self.max_prefill_beside_decode
            ),
        }
        options = msgspec.convert(self.model_copy(update=defaults), EngineOptions, from_attributes=True)
        # admission control never sends more requests than can run
        return msgspec.structs.replace(options, max_waiting=self.max_sequences)


class RecoveryConfig(Section):
    """When an engine counts as hung, and how often the node restarts an engine that crashed or hung.

    Attributes:
        step_timeout_secs: seconds without progress after which an engine with running requests counts as hung.
        load_timeout_secs: seconds without progress after which an engine that loads a model counts as hung.
        max_restarts: largest number of restarts of one model within `restart_window_secs`. A model that needs more
            restarts is quarantined (status `poisoned`).
    """

    step_timeout_secs: float = Field(default=120.0, ge=0.1)
    load_timeout_secs: float = Field(default=600.0, ge=0.1)
    max_restarts: int = Field(default=3, ge=0)
    restart_window_secs: float = Field(default=600.0, gt=0)


class ResponsesConfig(Section):
    """Storage of `/v1/responses` in memory, for `previous_response_id`.

    Attributes:
        store_mb: memory limit of all stored responses together, in MiB; 0 stores no responses.
        store_entries: largest number of stored responses.
        store_secs: lifetime of a stored response, in seconds.
    """

    store_mb: int = Field(default=64, ge=0)
    store_entries: int = Field(default=10_000, ge=1)
    store_secs: float = Field(default=86_400.0, gt=0)


class HarnessTables(Section):
    """The `[harness.*]` tables of neuron.toml: engine options. The table `candle` is the former name of `torch`."""

    torch: TorchConfig = Field(default_factory=TorchConfig, validation_alias=AliasChoices("torch", "candle"))


class HarnessEntry(Section):
    """An entry of `[[harnesses]]` in neuron.toml, which enables an engine."""

    name: HarnessName


class NeuronConfig(Section):
    """All settings of neuron.toml.

    Attributes:
        host: address to listen on.
        api_key: key that every request except `GET /health` must carry as `Authorization: Bearer KEY`. Unset: no key is
            required.
        allowed_hosts: additional names of this node that requests may have in the `Host` header. IP addresses,
            localhost, the machine's name and `host` are always accepted. The node checks `Host` only without an
            `api_key`: in all requests if `host` is a loopback address, else only in requests from browsers.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=13131, ge=1, le=65535)
    api_key: SecretStr | None = Field(default=None, min_length=1)
    allowed_hosts: list[str] = Field(default_factory=list[str])
    default_models: list[DefaultModel] = Field(default_factory=list[DefaultModel])
    harnesses: list[HarnessEntry] = Field(default_factory=lambda: [HarnessEntry(name="torch")])
    harness: HarnessTables = Field(default_factory=HarnessTables)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    downloads: DownloadsConfig = Field(default_factory=DownloadsConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    responses: ResponsesConfig = Field(default_factory=ResponsesConfig)


def read_config(path: Path | None, environ: Mapping[str, str] | None = None) -> NeuronConfig:
    """Read the configuration from the file `path` (None: defaults) and from environment variables.

    Raises:
        ConfigError: a setting is invalid; the message is one line that names the setting.
    """
    return load(NeuronConfig, path, env_prefix=ENV_PREFIX, short_names=_SHORT_NAMES, environ=environ)


def log_unknown_variables() -> None:
    """Log one line that lists the `NEURON_` environment variables that are no setting and therefore have no effect."""
    variables.log_unknown_variables(NeuronConfig, prefix=ENV_PREFIX, short=_SHORT_NAMES, others=(DEBUG_FAULT, PLAN_LOG))
