"""Formats of the data that nodes report about themselves and their models to the gateway.

The classes ignore unknown fields and have defaults for nested objects. Gateways and nodes of different versions can
therefore work together.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ModelStatus = Literal["loaded", "unloaded", "reloading", "loading", "recovering", "poisoned"]
WireInt = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer of 64 bits, which every JSON library can represent."""


class Record(BaseModel):
    """Base class of the records that nodes report. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    def json_dict(self) -> dict[str, Any]:
        """Return the record as a JSON object, without fields that are None."""
        return self.model_dump(mode="json", exclude_none=True)


class Device(Record):
    """Constant properties of one accelerator (GPU) of a node."""

    index: WireInt
    name: str
    vram_total_mb: WireInt
    compute_capability: str | None = None


def alike(devices: Iterable[Device]) -> list[list[Device]]:
    """Divide devices into groups of the same name and compute capability, in the order of their first devices."""
    groups: dict[tuple[str, str | None], list[Device]] = {}
    for device in devices:
        groups.setdefault((device.name, device.compute_capability), []).append(device)
    return list(groups.values())


class NumaNode(Record):
    """A NUMA node of a machine: CPUs, and the memory that is local to them.

    Attributes:
        node: number of the NUMA node in the operating system.
        cpus: number of CPUs (hardware threads) that engines may use.
        memory_total_mb: memory in MiB; 0 if unknown.
    """

    node: WireInt
    cpus: WireInt
    memory_total_mb: WireInt = 0


class GroupHost(Record):
    """A host of a host group that is connected now: its number in the group, its name and its memory in MiB."""

    host: WireInt
    hostname: str
    memory_total_mb: WireInt = 0


class Discovery(Record):
    """Response of `GET /discovery`: properties of a node that are constant while its process runs.

    Attributes:
        unified_accelerator: name of an accelerator that uses main memory, such as Apple's GPU, or None. This
            accelerator is not listed in `devices`.
        devices: the accelerators that engines can use. Engines number the accelerators in the same way.
        numa_nodes: the NUMA nodes whose CPUs engines may use, or None if there is only one.
        max_tensor_parallel: largest number of ranks for which a gateway may ask in a load request. None for nodes that
            do not report it.
        hosts: the connected hosts of the node's host group, or None if the node has no group.
    """

    hostname: str
    os: str
    kernel: str = ""
    cpu: str = ""
    cpu_cores: WireInt = 0
    memory_total_mb: WireInt = 0
    cuda_version: str | None = None
    driver_version: str | None = None
    cuda_unavailable_reason: str | None = None
    unified_accelerator: str | None = None
    devices: list[Device] = Field(default_factory=list[Device])
    numa_nodes: list[NumaNode] | None = None
    max_tensor_parallel: WireInt | None = None
    hosts: list[GroupHost] | None = None
    harnesses: list[str] = Field(default_factory=lambda: ["torch"])
    max_prompt_tokens: WireInt = 0


class DeviceHealth(Record):
    """Current memory usage, utilization and temperature of one accelerator."""

    index: WireInt
    vram_used_mb: WireInt
    vram_free_mb: WireInt
    utilization_pct: WireInt = 0
    temp_c: WireInt = 0


class FailedLoad(Record):
    """A model whose load or recovery failed, and the error message."""

    model_id: str
    error: str


class Activation(Record):
    """Progress of a node's start, during which it loads the models that its configuration lists."""

    state: Literal["pre_warming", "ready"] = "ready"
    pending: list[str] = Field(default_factory=list[str])
    in_progress: str | None = None
    stage: str | None = None
    progress: float | None = None
    completed: list[str] = Field(default_factory=list[str])
    failed: list[FailedLoad] = Field(default_factory=list[FailedLoad])


class Loading(Record):
    """A model that is loading.

    Attributes:
        stage: current stage of the load, if known.
        progress: completed fraction (0 to 1) of the stage, if known.
    """

    model_id: str
    stage: str | None = None
    progress: float | None = None


class ModelLoad(Record):
    """Current requests, memory usage and speed of one model on a node.

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
        encoded_images_total: number of images that the vision tower has encoded since the model was loaded.
        reused_images_total: number of images whose embeddings were found in the cache of the encoder.
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
    encoded_images_total: WireInt = 0
    reused_images_total: WireInt = 0
    tok_s_prefill: float = 0.0
    tok_s_decode: float = 0.0


class Health(Record):
    """Response of `GET /health` of a node.

    Attributes:
        memory_free_mb, memory_total_mb: free and total host memory in MiB, within the limits of the node's container.
            None if unknown.
        loading: the models that are loading.
        poisoned: the models that the node no longer serves because their engines crashed repeatedly, with the last
            error. The node serves such a model again only after a new load request.
        responses: id prefix of the API responses that this process stores, or None if it stores none. From the prefix,
            the gateway knows which node stores a response.
    """

    uptime_secs: WireInt = 0
    memory_free_mb: WireInt | None = None
    memory_total_mb: WireInt | None = None
    devices: list[DeviceHealth] = Field(default_factory=list[DeviceHealth])
    activation: Activation = Field(default_factory=Activation)
    loading: list[Loading] = Field(default_factory=list[Loading])
    poisoned: list[FailedLoad] = Field(default_factory=list[FailedLoad])
    responses: str | None = None
    models: list[ModelLoad] = Field(default_factory=list[ModelLoad])


class Limit(Record):
    """Maximum number of tokens of a model on a node: context length, input tokens and output tokens."""

    context: WireInt
    input: WireInt | None = None
    output: WireInt | None = None


class Servable(Record):
    """Whether a model could serve a minimal request now. If not, `reason` and `detail` say why."""

    ok: bool
    reason: str | None = None
    detail: str | None = None


class SamplingDefaults(Record):
    """Sampling parameters that an operator sets for a model.

    A request overrides them. They override the values that the model's publisher recommends.
    """

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: WireInt | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)


class ModelSpec(Record):
    """Request body of `POST /models/load`: the model to load, and options of the load.

    Attributes:
        mmproj: path on the node of the GGUF file with the vision tower of a GGUF model. None to look for the file
            beside the model.
        max_image_tokens: maximum number of tokens of an image. Larger images are shrunk.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model_id: str = Field(min_length=1)
    harness: str = "torch"
    source: str | None = None
    quant: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    devices: list[int] | None = None
    tool_parser: str | None = None
    sampling: SamplingDefaults | None = None
    mmproj: str | None = None
    max_image_tokens: int | None = Field(default=None, ge=16, le=1 << 16)


class ModelInfo(Record):
    """One model in the response of `GET /models`.

    Attributes:
        status: state of the model. `poisoned` means that the node rejects requests because the engine crashed
            repeatedly.
        quant: format to which the node quantized the weights during the load, or None.
        tensor_parallel: number of ranks that compute the model together on each host, or None if there is one.
        pipeline_parallel: number of hosts that compute the model together, or None if there is one.
        progress: completed fraction (0 to 1) of `stage`, if known.
        stage: current stage of the load, if the model is loading.
    """

    id: str
    harness: str = "torch"
    status: ModelStatus = "loaded"
    devices: list[WireInt] = Field(default_factory=list[WireInt])
    vram_used_mb: WireInt | None = None
    quant: str | None = None
    tensor_parallel: WireInt | None = None
    pipeline_parallel: WireInt | None = None
    capabilities: list[str] = Field(default_factory=list[str])
    limit: Limit | None = None
    tool_call: bool = False
    reasoning: bool = False
    servable: Servable | None = None
    progress: float | None = None
    stage: str | None = None


class Cost(Record):
    """Prices of a model in USD per million tokens. None means that no price is known, 0.0 means free."""

    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None
