"""Options of a node that loads and serves models, with their defaults.

`neuron.config` reads and validates the options of nodes. Private engines use the defaults, and do not import pydantic.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from helexa.core.model_source_ids import DEFAULT_SCHEME
from helexa.core.sampling import Bounds
from helexa.neuron.engine.ipc.engine_options import (
    Activations,
    EngineOptions,
    PrefixReuse,
    StepTiming,
    TensorParallelMode,
)
from helexa.neuron.ops.kernel_header import MAX_RANKS, Kernels

MOST_DOWNLOADS = 64


class _Constraint:
    """Base class of constraints that, like `Bounds`, only pydantic checks."""

    __is_annotated_types_grouped_metadata__: ClassVar[Literal[True]] = True


@dataclass(frozen=True)
class Above(_Constraint):
    """The permitted range of a numeric option: above `low`."""

    low: float

    def __iter__(self) -> Iterator[Any]:
        from annotated_types import Gt

        yield Gt(self.low)


@dataclass(frozen=True)
class Pattern(_Constraint):
    """The permitted texts of an option: those that the regular expression matches."""

    text: str

    def __iter__(self) -> Iterator[Any]:
        from pydantic import StringConstraints

        yield from StringConstraints(pattern=self.text)


@dataclass(kw_only=True)
class SourceOptions:
    """Options of one model hub."""

    endpoint: Annotated[str | None, Pattern(r"^https?://")] = None  # base URL of the hub
    auth_env: str | None = None  # name of the environment variable that contains the access token
    cache_dir: Path | None = None  # folder for files downloaded from the hub


@dataclass(kw_only=True)
class CacheOptions:
    """Options of the cache folder for models, packed weights and kernels."""

    # Path of the folder. Default: `$HELEXA_CACHE`, else `$XDG_CACHE_HOME/helexa`, else `~/.cache/helexa`.
    dir: Path | None = None


@dataclass(kw_only=True)
class DownloadsOptions:
    """Options for downloading model files from hubs."""

    # Maximum number of concurrent downloads. Default: `$HELEXA_MAX_CONCURRENT_DOWNLOADS`, else 8.
    max_concurrent: Annotated[int | None, Bounds(1, MOST_DOWNLOADS)] = None
    # seconds without data after which a connection is treated as broken
    stall_secs: Annotated[float, Bounds(0.1, 3600)] = 30.0
    # Whether clients may start downloads (`POST /models/pull`). A load request downloads a missing model in any case.
    on_request: bool = True


@dataclass(kw_only=True)
class AdmissionOptions:
    """Limits on running and waiting requests of each loaded model."""

    # Maximum number of requests in the running batch. Default and upper bound: the engine option `max_sequences`.
    max_in_flight: Annotated[int | None, Bounds(1)] = None
    # maximum number of requests that wait for a slot in the running batch
    max_queue_depth: Annotated[int, Bounds(0)] = 256
    max_wait_secs: Annotated[float, Bounds(0)] = 30.0  # maximum wait for a slot, in seconds
    # Maximum number of running and waiting requests of one principal (API key owner); 0 for no limit. Principals get
    # fair shares of the slots in either case.
    max_per_principal: Annotated[int, Bounds(0)] = 0
    # Maximum number of running requests without a principal; 0 rejects all of them. Default: all slots, or all slots
    # except one if there are at least eight.
    anon_max_in_flight: Annotated[int | None, Bounds(0)] = None
    # Maximum number of running and waiting requests without a principal. Default: `max_in_flight + max_queue_depth -
    # 1`.
    anon_max_pending: Annotated[int | None, Bounds(0)] = None
    # Maximum wait for KV cache memory, in seconds. A request that is next in line for a free slot waits if the KV cache
    # lacks memory for it.
    kv_max_wait_secs: Annotated[float, Bounds(0)] = 240.0


@dataclass(kw_only=True)
class ContextLimitOptions:
    """Limits on a model's context length besides the trained length and the KV cache."""

    enabled: bool = True  # whether the measured prefill rate limits the context length
    # Maximum time for the prefill of a full context, in seconds. Default: 120, or 600 on a CPU.
    target_prefill_latency_secs: Annotated[float | None, Above(0)] = None
    # Prefill rate, in prompt tokens per second, that is assumed before the first measurement. Default: 800, or 100 on a
    # CPU.
    bootstrap_prefill_tok_per_sec: Annotated[float | None, Above(0)] = None
    # memory that models leave free for unforeseen allocations, in MiB
    activation_headroom_mb: Annotated[int, Bounds(0)] = 256
    min_free_floor_mb: Annotated[int, Bounds(0)] = 512  # memory that models leave free for other processes, in MiB
    # Number of tokens to reserve for the output, at most a quarter of the context limit. A model's prompt limit
    # (`limit.input`) is its context limit minus this reserve.
    output_reserve_tokens: Annotated[int, Bounds(1)] = 8192
    # Output limit of requests that set no limit. 0: only the context length limits the output.
    default_output_tokens: Annotated[int, Bounds(0)] = 0
    # Maximum context length of all models, in tokens; 0 for no limit. The environment variable
    # `NEURON_MAX_PROMPT_TOKENS` also sets this option.
    max_prompt_tokens: Annotated[int, Bounds(0)] = 0


@dataclass(kw_only=True)
class TorchOptions:
    """Options of sources and the engine, except the options in `EngineOptions`."""

    # scheme of the source for model ids without a scheme
    default_source: Annotated[str, Pattern(r"^[a-z][a-z0-9_-]*$")] = DEFAULT_SCHEME
    hf_cache: Path | None = None
    # options of each model hub, by scheme
    sources: dict[str, SourceOptions] = field(default_factory=dict[str, SourceOptions])
    # Torch name of the device on which models run. `auto` selects the CUDA device with the most memory, or the CPU if
    # there is no CUDA device.
    device: Annotated[str, Pattern(r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kernels: Kernels = "auto"
    threads: Annotated[int, Bounds(0)] = 0
    # Maximum number of tokens in one engine step (forward pass). Default: 512, or 2048 on a CUDA device.
    max_step_tokens: Annotated[int | None, Bounds(1)] = None
    # Maximum number of prefill tokens in a step that also decodes other sequences. Default: 128, or 2048 on a CUDA
    # device. The engine uses fewer tokens if such a step would take too long.
    max_prefill_beside_decode: Annotated[int | None, Bounds(0)] = None
    max_sequences: Annotated[int, Bounds(1)] = 64
    context_length: Annotated[int, Bounds(0)] = 0
    kv_cache_mb: Annotated[int, Bounds(0)] = 0
    memory_limit_mb: Annotated[int, Bounds(0)] = 0
    snapshot_mb: Annotated[int, Bounds(0)] = 0
    activations: Activations = "auto"
    kv_dtype: Literal["auto", "int8", "unquantized"] = "auto"
    prefix_reuse: PrefixReuse = "principal"
    # MiB of the disk for the KV pages of earlier prompts, of all models together; 0 for none. The pages are in the
    # folder `prompts` of the cache folder. Default: 0; in `helexa up` and in private engines, a tenth of the free disk,
    # at most 20,480.
    prefix_disk_mb: Annotated[int | None, Bounds(0)] = None
    # Seconds without requests after which a model falls asleep: its engine process ends, and the next request starts it
    # again. A load request may set another number. 0: never.
    idle_unload_secs: Annotated[float, Bounds(0)] = 0.0
    speculation: bool = True
    speculation_max_sequences: Annotated[int, Bounds(0)] = 4
    graphs: bool = True
    overlap: bool | None = None
    # Default number of processes (ranks) that compute a model together. A load request may set another number. The
    # ranks run on CPUs, or each on its own CUDA device.
    tensor_parallel: Annotated[int, Bounds(1, MAX_RANKS)] = 1
    tensor_parallel_mode: TensorParallelMode = "auto"
    # Default number of hosts of the group that compute a model together. A load request may set another number.
    # Default: all hosts.
    pipeline_parallel: Annotated[int | None, Bounds(1)] = None
    # Maximum number of tokens of an image. Larger images are shrunk. A load request may set another number. Default:
    # 1024, or 4096 on a CUDA device.
    max_image_tokens: Annotated[int | None, Bounds(16, 1 << 16)] = None
    image_cache_mb: Annotated[int, Bounds(1)] = 256
    step_timing: StepTiming = "measured"
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    context_limit: ContextLimitOptions = field(default_factory=ContextLimitOptions)

    def engine_options(self, device: str) -> EngineOptions:
        """Return the options of an engine on `device`, with that device's defaults."""
        cuda = device.startswith("cuda")
        step, prefill_beside_decode = (2048, 2048) if cuda else (512, 128)
        values = {name: getattr(self, name) for name in EngineOptions.__struct_fields__ if hasattr(self, name)}
        values |= {
            "device": device,
            "max_image_tokens": self.max_image_tokens or (4096 if cuda else 1024),
            "pipeline_parallel": self.pipeline_parallel or 1,
            "prefix_disk_mb": self.prefix_disk_mb or 0,
            "max_step_tokens": step if self.max_step_tokens is None else self.max_step_tokens,
            "max_prefill_beside_decode": (
                prefill_beside_decode if self.max_prefill_beside_decode is None else self.max_prefill_beside_decode
            ),
        }
        options = msgspec.convert(values, EngineOptions)
        # The engine's queue can be this short, because admission control never sends more requests than can run.
        return msgspec.structs.replace(options, max_waiting=self.max_sequences)


@dataclass(kw_only=True)
class RecoveryOptions:
    """Timeouts of hung engines, and limits on restarts of crashed engines."""

    # Seconds without progress after which an engine with running requests is treated as hung. In steps whose duration
    # the engine can predict, the limit is usually shorter, at least 5 seconds.
    step_timeout_secs: Annotated[float, Bounds(0.1)] = 120.0
    # seconds without progress after which an engine that loads a model is treated as hung
    load_timeout_secs: Annotated[float, Bounds(0.1)] = 600.0
    # Maximum number of restarts of one model's engine within `restart_window_secs` seconds. After one more crash, the
    # model is quarantined (status `poisoned`) and rejects requests.
    max_restarts: Annotated[int, Bounds(0)] = 3
    restart_window_secs: Annotated[float, Above(0)] = 600.0


@dataclass(kw_only=True)
class HarnessOptions:
    """The options of each kind of engine; `torch` is the only kind."""

    torch: TorchOptions = field(default_factory=TorchOptions)


@dataclass(kw_only=True)
class NodeOptions:
    """The options of `NeuronConfig` that the model registry and model sources use."""

    default_models: tuple[()] = ()
    harness: HarnessOptions = field(default_factory=HarnessOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    downloads: DownloadsOptions = field(default_factory=DownloadsOptions)
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
