"""Records that nodes report: models, devices, health and downloads.

The classes ignore unknown fields and have defaults for nested objects. Gateways and nodes of different versions can
therefore work together. Fields whose name ends in `_mb` are in MiB.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from helexa.core.load_options import LoadOptions, ModelId
from helexa.core.sampling import RecommendedSampling

ModelStatus = Literal["loaded", "unloaded", "reloading", "loading", "recovering", "poisoned", "sleeping"]
WireInt = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # an integer of 64 bits, which every JSON library can represent
MAX_LOCAL_MODELS = 1000  # maximum number of models that a node reports


class Record(BaseModel):
    """Base class of the records that nodes report. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, defer_build=True)

    def json_dict(self) -> dict[str, Any]:
        """Return the record as a JSON object, without fields that are None."""
        return self.model_dump(mode="json", exclude_none=True)


class Device(Record):
    """In a node's report: constant properties of one accelerator (GPU)."""

    index: WireInt
    name: str
    vram_total_mb: WireInt
    compute_capability: str | None = None


def alike(devices: Iterable[Device]) -> list[list[Device]]:
    """Group the devices in a node's report by name and compute capability."""
    groups: dict[tuple[str, str | None], list[Device]] = {}
    for device in devices:
        groups.setdefault((device.name, device.compute_capability), []).append(device)
    return list(groups.values())


class NumaNode(Record):
    """In a node's report: a NUMA node's CPUs, and the memory local to them."""

    node: WireInt  # number of the NUMA node in the operating system
    cpus: WireInt  # number of CPUs (hardware threads) that engines may use
    memory_total_mb: WireInt = 0  # memory in MiB; 0 if unknown


class GroupHost(Record):
    """In a node's report: a connected host, its number, name and memory in MiB."""

    host: WireInt
    hostname: str
    memory_total_mb: WireInt = 0


# Prefix of the random, wrong key that a gateway sends to a joining node, to check that the node requires its own key.
CHECK_KEY = "helexa-check-"


class Discovery(Record):
    """Response of `GET /discovery`: constant properties of a node's process."""

    hostname: str
    os: str
    kernel: str = ""
    cpu: str = ""
    cpu_cores: WireInt = 0
    memory_total_mb: WireInt = 0
    cuda_version: str | None = None
    driver_version: str | None = None
    cuda_unavailable_reason: str | None = None
    # Name of an accelerator that uses main memory, such as Apple's GPU, or None. This accelerator is not listed in
    # `devices`.
    unified_accelerator: str | None = None
    # The accelerators that engines can use. An accelerator with the index N is the device `cuda:N` in engines.
    devices: list[Device] = Field(default_factory=list[Device])
    numa_nodes: list[NumaNode] | None = None  # the NUMA nodes whose CPUs engines may use, or None if there is only one
    # Largest number of ranks that a gateway may request for a load. None if the node does not report this number.
    max_tensor_parallel: WireInt | None = None
    # the connected hosts of the node's host group, or None if the node has no group
    hosts: list[GroupHost] | None = None
    harnesses: list[str] = Field(default_factory=lambda: ["torch"])
    max_prompt_tokens: WireInt = 0
    # memory in MiB of each device that all models of the node may use together, or None if the node has no such limit
    memory_limit_mb: WireInt | None = None
    # Text that is equal for nodes that share their main memory, because they run on the same machine. None if unknown.
    machine: str | None = None


class DeviceHealth(Record):
    """In a node's report: memory usage, utilization, temperature of an accelerator."""

    index: WireInt
    vram_used_mb: WireInt
    vram_free_mb: WireInt
    utilization_pct: WireInt = 0
    temp_c: WireInt = 0
    # memory in MiB that a new model may use, if the node has a memory limit; otherwise None
    grantable_mb: WireInt | None = None


class FailedLoad(Record):
    """In a node's report: a model whose load or recovery failed, and the error."""

    model_id: str
    error: str


class Activation(Record):
    """In a node's report: progress of the loads at the node's start.

    At its start, a node loads the models that are listed as `default_models` in its configuration.
    """

    state: Literal["pre_warming", "ready"] = "ready"
    pending: list[str] = Field(default_factory=list[str])
    in_progress: str | None = None
    stage: str | None = None
    progress: float | None = None
    completed: list[str] = Field(default_factory=list[str])
    failed: list[FailedLoad] = Field(default_factory=list[FailedLoad])


class Loading(Record):
    """A model that is loading."""

    model_id: str
    stage: str | None = None  # current stage of the load, if known
    progress: float | None = None  # completed fraction (0 to 1) of the stage, if known


class ModelLoad(Record):
    """In a node's report: requests, memory usage and speed of one model.

    Attributes:
        in_flight: number of running requests.
        queue_depth: number of waiting requests.
        anon_in_flight: number of running requests without an API key.
        max_in_flight, max_queue_depth, anon_max_in_flight: limits of the three numbers above.
        rejected_*: number of requests rejected since the model was loaded. There is one field for each reason.
        kv_budget_mb: total memory of the KV cache in MiB.
        kv_available_mb: memory of the KV cache that is neither used nor reserved, in MiB.
        kv_pages_total: number of KV pages.
        kv_pages_free: number of KV pages that no running request uses. A free page keeps its content until it is
            overwritten, and a later prompt with the same prefix can use this content.
        prompt_tokens_total: number of prompt tokens since the model was loaded.
        cached_prompt_tokens_total: number of prompt tokens found in the prefix cache since the model was loaded.
        cached_prompts_total: number of prompts, since the load, whose beginning was found in the prefix cache.
        disk_prompt_tokens_total, disk_prompts_total: parts of the two numbers above whose KV pages were read from
            disk.
        disk_read_bytes_total, disk_read_ms_total: bytes that were read from disk, and duration of the reads in ms.
        memory_prefixes, disk_prefixes: ids, chosen by gateways, of beginnings of prompts that are cached in memory, or
            only on disk.
        saved_prompts_mb: size in MiB of the prompts on disk that the model can read.
        encoded_images_total: number of images that the vision tower has encoded since the model was loaded.
        reused_images_total: number of images whose embeddings were found in the cache of the encoder.
        ngram_drafts_total, accepted_ngram_drafts_total: number of drafts (predicted tokens) by n-gram lookup that were
            verified since the model was loaded, and how many were accepted.
        model_drafts_total, accepted_model_drafts_total: the same numbers for drafts of the draft model.
        draft_gain: speed of recent decode steps divided by their estimated speed without the draft model; 0 without a
            draft model.
        tok_s_prefill, tok_s_decode: recent speed of prefill and decode, in tokens per second.
    """

    id: str
    in_flight: WireInt = 0
    queue_depth: WireInt = 0
    max_in_flight: WireInt = 0
    max_queue_depth: WireInt = 0
    rejected_queue_full: WireInt = 0
    rejected_timeout: WireInt = 0
    rejected_per_principal: WireInt = 0
    rejected_anon_yield: WireInt = 0
    rejected_kv_timeout: WireInt = 0
    rejected_kv_unservable: WireInt = 0
    anon_in_flight: WireInt = 0
    anon_max_in_flight: WireInt = 0
    kv_budget_mb: WireInt = 0
    kv_available_mb: WireInt = 0
    kv_pages_total: WireInt = 0
    kv_pages_free: WireInt = 0
    prompt_tokens_total: WireInt = 0
    cached_prompt_tokens_total: WireInt = 0
    cached_prompts_total: WireInt = 0
    disk_prompt_tokens_total: WireInt = 0
    disk_prompts_total: WireInt = 0
    disk_read_bytes_total: WireInt = 0
    disk_read_ms_total: WireInt = 0
    saved_prompts_mb: WireInt = 0
    memory_prefixes: frozenset[str] = frozenset()
    disk_prefixes: frozenset[str] = frozenset()
    encoded_images_total: WireInt = 0
    reused_images_total: WireInt = 0
    ngram_drafts_total: WireInt = 0
    accepted_ngram_drafts_total: WireInt = 0
    model_drafts_total: WireInt = 0
    accepted_model_drafts_total: WireInt = 0
    draft_gain: float = 0.0
    tok_s_prefill: float = 0.0
    tok_s_decode: float = 0.0

    def prefix_tiers(self) -> dict[str, tuple[int, int]]:
        """Return for the tiers `memory` and `disk` how many prompts and tokens were found."""
        prompts, tokens = self.disk_prompts_total, self.disk_prompt_tokens_total
        memory = max(self.cached_prompts_total - prompts, 0), max(self.cached_prompt_tokens_total - tokens, 0)
        return {"memory": memory, "disk": (prompts, tokens)}


class Health(Record):
    """Response of `GET /health` of a node."""

    uptime_secs: WireInt = 0
    # Free and total host memory in MiB, within the limits of the node's container. None if unknown.
    memory_free_mb: WireInt | None = None
    memory_total_mb: WireInt | None = None
    # host memory in MiB that a new model may use, if the node runs models on the CPU; otherwise None
    grantable_mb: WireInt | None = None
    devices: list[DeviceHealth] = Field(default_factory=list[DeviceHealth])
    activation: Activation = Field(default_factory=Activation)
    loading: list[Loading] = Field(default_factory=list[Loading])  # the models that are loading
    # The models that the node no longer serves because their engines crashed repeatedly, with the last error. The node
    # serves such a model again only after a new load request.
    poisoned: list[FailedLoad] = Field(default_factory=list[FailedLoad])
    # Id prefix of the API responses that this process stores, or None if it stores none. From the prefix, the gateway
    # knows which node stores a response.
    responses: str | None = None
    # text that changes when the list of the models on the node's disks changes (see `LocalModels`); None
    # if the node does not report these models
    local_revision: str | None = None
    models: list[ModelLoad] = Field(default_factory=list[ModelLoad])


class Limit(Record):
    """In a node's report: maximum numbers of tokens of a request to a model."""

    context: WireInt  # maximum for the prompt and the output together
    input: WireInt | None = None  # maximum for the prompt, or None if unknown
    output: WireInt | None = None  # maximum for the output, or None if unknown


class Servable(Record):
    """In a node's report: whether a model could serve a minimal request now."""

    ok: bool
    reason: str | None = None
    detail: str | None = None


class SamplingDefaults(Record, RecommendedSampling):  # pyright: ignore[reportGeneralTypeIssues] - is not frozen
    """In a node's report: sampling parameters that an operator sets for a model.

    A request overrides these parameters. These parameters override the values that the model's publisher recommends.
    """


class ModelSpec(Record, LoadOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """Request body of `POST /models/load`: the model to load, and options of the load."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), defer_build=True)

    sampling: SamplingDefaults | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class ModelInfo(Record):
    """One model in the response of `GET /models`."""

    id: ModelId
    harness: str = "torch"
    # State of the model. `poisoned` means that the node rejects requests because the engine crashed repeatedly.
    # `sleeping` means that the idle model has no engine, and wakes at the next request or load request.
    status: ModelStatus = "loaded"
    devices: list[WireInt] = Field(default_factory=list[WireInt])
    # memory in MiB of the weights and the KV cache, on an accelerator or in main memory
    vram_used_mb: WireInt | None = None
    # Memory in MiB that the node keeps for the model. It counts toward the node's memory limit. None if the model runs
    # on an accelerator and the node has no limit.
    granted_mb: WireInt | None = None
    # name of the model's architecture, such as `qwen3`; None if the model is not loaded
    architecture: str | None = None
    quant: str | None = None  # format to which the node quantized the weights during the load, or None
    # number of ranks that compute the model together on each host, or None if there is one
    tensor_parallel: WireInt | None = None
    pipeline_parallel: WireInt | None = None  # number of hosts that compute the model together, or None if there is one
    capabilities: list[str] = Field(default_factory=list[str])
    limit: Limit | None = None
    tool_call: bool = False
    reasoning: bool = False
    servable: Servable | None = None
    progress: float | None = None  # completed fraction (0 to 1) of `stage`, if known
    stage: str | None = None  # current stage of the load, if the model is loading or waking


class Cost(Record):
    """In a node's report: prices of a model in USD per million tokens."""

    # The price 0.0 means that the tokens are free. An optional price is None if it is not known.
    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None


class LocalModel(Record):
    """In a node's report: a model in a cache or model folder, loaded or not."""

    id: ModelId  # model id in requests, which is also the id of the loaded model
    source: str  # source id for load requests, such as `huggingface:org/name` or `file:/models/tiny.gguf`
    # other names of the same files: source ids, and the id with the quantization
    names: list[str] = Field(default_factory=list[str])
    form: str = ""  # quantization of a GGUF file, `safetensors`, or empty if unknown
    size_bytes: WireInt = 0  # size of the model's files
    # Estimated MiB that the model needs with a context of 2,048 tokens, from the file headers. None if unknown.
    memory_mb: WireInt | None = None
    context: WireInt | None = None  # trained context length in tokens, or None if unknown
    architecture: str | None = None  # name of the model's architecture, such as `qwen3`, or None if unknown
    parameters: WireInt | None = None  # number of parameters, or None if unknown
    # capabilities such as `text` and `vision`, as far as the files show; empty if unknown
    capabilities: list[str] = Field(default_factory=list[str])
    # `tool_call`: whether the chat template uses tools. `reasoning`: whether the template can switch reasoning on.
    tool_call: bool = False
    reasoning: bool = False
    # when the files were last changed, in seconds since 1970-01-01 UTC, or None if unknown
    modified: WireInt | None = None
    problem: str | None = None  # why the model cannot be loaded, or None if it can

    @property
    def usable(self) -> bool:
        """Whether the model can be loaded, as far as its files show."""
        return self.problem is None


class LocalModels(Record):
    """Response of `GET /models/local` of a node."""

    revision: str = ""  # text that changes when the list changes; equal to `local_revision` in `GET /health`
    # the models, sorted by id, at most `MAX_LOCAL_MODELS`
    models: list[LocalModel] = Field(default_factory=list[LocalModel])
    complete: bool = True  # False if the node has more models than the list
    problems: list[str] = Field(default_factory=list[str])  # one line for each folder that cannot be read
    downloads: bool = False  # whether the node downloads models on request


class PullRequest(Record):
    """Body of `POST /models/pull` of a node: the model to download."""

    model: ModelId  # a source id, such as `org/name` or `org/name:Q4_K_M`
    quant: str | None = Field(default=None, max_length=100)  # quantization to download, if the source id names none


class Pull(Record):
    """The state of a download."""

    model: str  # the source id that the client named
    status: Literal["running", "done", "failed", "canceled"] = "running"  # state of the download
    stage: str | None = None  # current stage, such as `list`, `download` or `unpack`
    # bytes of the stage so far, and in total; `total` is None if unknown
    done: WireInt = 0
    total: WireInt | None = None
    error: str | None = None  # why the download failed, or None if it has not failed


class LoadProgress(Record):
    """In a `NodeReport`: a loading model, its stage, and completed fraction if known."""

    model: str
    stage: str | None = None
    fraction: float | None = None


class NodeReport(Record):
    """The gateway's report about one node (`GET /api/nodes`), as commands read it."""

    name: str
    endpoint: str = ""
    kind: str = "neuron"
    healthy: bool = False
    models: list[ModelInfo] = Field(default_factory=list[ModelInfo])
    load: list[ModelLoad] = Field(default_factory=list[ModelLoad])  # current load of each model
    # progress of the models that the node loads at its start
    activation: Activation = Field(default_factory=Activation)
    devices: list[DeviceHealth] = Field(default_factory=list[DeviceHealth])
    discovery: Discovery | None = None
    memory_free_mb: int | None = None
    loads: list[LoadProgress] = Field(default_factory=list[LoadProgress])  # the gateway's running and waiting loads
    # when idle models will be unloaded (Unix seconds), by model
    unload_at: dict[str, float] = Field(default_factory=dict[str, float])

    def load_of(self, model: str) -> ModelLoad | None:
        """Return the `ModelLoad` of `model` on this node, or None if there is none."""
        return next((load for load in self.load if load.id == model), None)
