"""neuron.toml: where the node listens, which models it loads at start, and how its engines run.

Variables that start with `NEURON_` override the file: `NEURON_PORT`, `NEURON_HARNESS__TORCH__DEVICE`. The former names
`[harness.candle]` and `NEURON_HARNESS__CANDLE__...` mean `torch`; if two variables set one key, the current name wins.
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
    """A model to load at start; the same fields as a load request, but a misspelt one is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CacheConfig(Section):
    """Where models, packed weights and compiled kernels are kept.

    Attributes:
        dir: unset is `$HELEXA_CACHE`, else `$XDG_CACHE_HOME/helexa`.
    """

    dir: Path | None = None


class DownloadsConfig(Section):
    """How model files are fetched from hubs.

    Attributes:
        max_concurrent: files that come in at once; unset is `$HELEXA_MAX_CONCURRENT_DOWNLOADS`, else 8.
        stall_secs: of silence, after which a connection counts as broken.
    """

    max_concurrent: int | None = Field(default=None, ge=1, le=MOST_DOWNLOADS)
    stall_secs: float = Field(default=30.0, ge=0.1, le=3600)


class LogConfig(Section):
    """What goes to stderr. `$HELEXA_LOG` and `$HELEXA_LOG_FORMAT` win over it.

    Attributes:
        level: least severe lines that are written; `debug` has the requests of gateways that merely poll as well.
        format: lines for people, or JSON objects for programs.
    """

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    format: LogFormat = "text"


class SourceConfig(Section):
    """A model hub.

    Attributes:
        endpoint: its base URL.
        auth_env: the environment variable that holds its token.
        cache_dir: where its files are kept.
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    auth_env: str | None = None
    cache_dir: Path | None = None


class AdmissionConfig(Section):
    """Who may use a model at once, and who waits; for each loaded model by itself.

    Attributes:
        max_in_flight: requests in the batch; unset, or more than `max_sequences`, is `max_sequences`.
        max_queue_depth: requests that wait for a seat in it.
        max_wait_secs: that one waits for a seat.
        max_per_principal: requests of one principal, waiting ones included; 0 for no bound, since they take turns.
        anon_max_in_flight: of them without a principal; 0 refuses them. Unset is what one principal may have: all, or
            of eight and more all but one.
        anon_max_pending: without a principal, waiting ones included; unset is one less than there is room for.
        kv_max_wait_secs: that one whose turn it is waits for memory for its keys and values.
    """

    max_in_flight: int | None = Field(default=None, ge=1)
    max_queue_depth: int = Field(default=256, ge=0)
    max_wait_secs: float = Field(default=30.0, ge=0)
    max_per_principal: int = Field(default=0, ge=0)
    anon_max_in_flight: int | None = Field(default=None, ge=0)
    anon_max_pending: int | None = Field(default=None, ge=0)
    kv_max_wait_secs: float = Field(default=240.0, ge=0)


class ContextLimitConfig(Section):
    """How long a context a model may have, below what it was trained on and what its KV cache holds.

    Attributes:
        enabled: prompts are bounded by the time that they take as well.
        target_prefill_latency_secs: that a prompt may take until its first token; unset is 120, and 600 on a CPU.
        bootstrap_prefill_tok_per_sec: prompt tokens a second until they are measured; unset is 800, and 100 on a CPU.
        activation_headroom_mb, min_free_floor_mb: MiB of free memory that no model is given: for what was not foreseen,
            and for others.
        output_reserve_tokens: of the context that `limit.input` leaves to the answer, at most a quarter of it.
        default_output_tokens: most tokens of an answer whose request states no limit; 0 for what the context leaves.
        max_prompt_tokens: of any context, 0 for no such bound; `NEURON_MAX_PROMPT_TOKENS` sets it.
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
    """The engine. The numbers mean what they mean in `EngineOptions`.

    Attributes:
        default_source: scheme of ids that name none.
        sources: hubs by scheme.
        device: `auto` is the CUDA device with the most memory if there is one, else the CPU.
        max_step_tokens: unset is 512, and 2048 on a CUDA device.
        max_prefill_beside_decode: unset is 128, and 2048 on a CUDA device, where their measured time bounds them.
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
        """The options of an engine that runs on `device`."""
        step, beside = (2048, 2048) if device.startswith("cuda") else (512, 128)
        decided = {
            "device": device,
            "max_step_tokens": step if self.max_step_tokens is None else self.max_step_tokens,
            "max_prefill_beside_decode": (
                beside if self.max_prefill_beside_decode is None else self.max_prefill_beside_decode
            ),
        }
        options = msgspec.convert(self.model_copy(update=decided), EngineOptions, from_attributes=True)
        return msgspec.structs.replace(options, max_waiting=self.max_sequences)  # more than run are never sent


class RecoveryConfig(Section):
    """When an engine counts as hung, and how often one that died is replaced.

    Attributes:
        step_timeout_secs: time without progress after which an engine that has work counts as hung.
        load_timeout_secs: the same for an engine that loads a model.
        max_restarts: of one model within `restart_window_secs`; one that would need more is given up (`poisoned`).
    """

    step_timeout_secs: float = Field(default=120.0, ge=0.1)
    load_timeout_secs: float = Field(default=600.0, ge=0.1)
    max_restarts: int = Field(default=3, ge=0)
    restart_window_secs: float = Field(default=600.0, gt=0)


class ResponsesConfig(Section):
    """Answers of `/v1/responses` that are kept in memory, for `previous_response_id`.

    Attributes:
        store_mb: that they may take together; 0 keeps none.
        store_entries: how many they may be.
        store_secs: that each is kept.
    """

    store_mb: int = Field(default=64, ge=0)
    store_entries: int = Field(default=10_000, ge=1)
    store_secs: float = Field(default=86_400.0, gt=0)


class HarnessTables(Section):
    """`[harness.*]`: one engine so far; its former name is understood."""

    torch: TorchConfig = Field(default_factory=TorchConfig, validation_alias=AliasChoices("torch", "candle"))


class HarnessEntry(Section):
    """`[[harnesses]]`: an engine that is switched on."""

    name: HarnessName


class NeuronConfig(Section):
    """The whole of neuron.toml.

    Attributes:
        host: address to listen on.
        api_key: key that every request but `GET /health` must carry as `Authorization: Bearer KEY`; unset: none.
        allowed_hosts: names of this node that a browser's request, or on a loopback address any request, may have in
            `Host`, besides IP addresses, localhost, the machine's name and `host`.
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
    """Read neuron.toml (None: defaults) and the environment.

    Raises:
        ConfigError: one line naming what is wrong and where.
    """
    return load(NeuronConfig, path, env_prefix=ENV_PREFIX, short_names=_SHORT_NAMES, environ=environ)


def log_unknown_variables() -> None:
    """Log one line about `NEURON_` variables that set nothing."""
    variables.log_unknown_variables(NeuronConfig, prefix=ENV_PREFIX, short=_SHORT_NAMES, others=(DEBUG_FAULT, PLAN_LOG))
