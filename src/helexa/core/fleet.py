"""Fleet records: what a node says of itself and of its models, as both sides of the wire read it.

Records tolerate unknown fields and default every nested object, so that a gateway and a node of different versions
still understand one another.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ModelStatus = Literal["loaded", "unloaded", "reloading", "loading", "recovering", "poisoned"]
WireInt = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What every JSON writer can pass on."""


class Record(BaseModel):
    """Base of all fleet records."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    def json_dict(self) -> dict[str, Any]:
        """The wire form: unknown (None) fields are absent, not null."""
        return self.model_dump(mode="json", exclude_none=True)


class Device(Record):
    """One accelerator."""

    index: WireInt
    name: str
    vram_total_mb: WireInt
    compute_capability: str | None = None


class Discovery(Record):
    """`GET /discovery`: facts that do not change while the process lives.

    Attributes:
        unified_accelerator: one that computes in main memory, as Apple's do; it is no device with memory of its own.
        devices: those that engines can see, numbered as they number them.
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
    harnesses: list[str] = Field(default_factory=lambda: ["torch"])
    max_prompt_tokens: WireInt = 0


class DeviceHealth(Record):
    """Live readings of one accelerator."""

    index: WireInt
    vram_used_mb: WireInt
    vram_free_mb: WireInt
    utilization_pct: WireInt = 0
    temp_c: WireInt = 0


class FailedLoad(Record):
    """A model that could not be loaded, or brought back."""

    model_id: str
    error: str


class Activation(Record):
    """Progress of the models that a node loads at start."""

    state: Literal["pre_warming", "ready"] = "ready"
    pending: list[str] = Field(default_factory=list[str])
    in_progress: str | None = None
    stage: str | None = None
    progress: float | None = None
    completed: list[str] = Field(default_factory=list[str])
    failed: list[FailedLoad] = Field(default_factory=list[FailedLoad])


class Loading(Record):
    """A load that runs: what it is doing, and how much of that is done, 0 to 1, where that is known."""

    model_id: str
    stage: str | None = None
    progress: float | None = None


class ModelLoad(Record):
    """How busy one loaded model is.

    Attributes:
        max_in_flight, max_queue_depth, anon_max_in_flight: ceilings of requests that run, that wait, and that run for
            callers without a key.
        rejected_queue_full, rejected_timeout, rejected_per_principal, rejected_anon_yield, rejected_kv_timeout,
            rejected_kv_unservable: requests that were turned away since the load, by reason.
        kv_budget_mb, kv_available_mb: memory for keys and values, and what of it is neither held nor promised.
        kv_pages_free: pages that nobody holds; what they hold may still be found by a prompt that begins alike.
        prompt_tokens_total, cached_prompt_tokens_total: since the load; the second were found in the KV cache.
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
    tok_s_prefill: float = 0.0
    tok_s_decode: float = 0.0


class Health(Record):
    """`GET /health` of a node.

    Attributes:
        memory_free_mb, memory_total_mb: of the host, as far as the node may use it; None where it does not say.
        loading: loads that run now, whoever asked for them.
        poisoned: models whose engines kept dying, and how; nothing brings them back but a load.
        responses: how the ids of responses begin that this process keeps; None where it keeps none.
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
    """Token limits of a model on a node."""

    context: WireInt
    input: WireInt | None = None
    output: WireInt | None = None


class Servable(Record):
    """Whether a minimal request would be served right now."""

    ok: bool
    reason: str | None = None
    detail: str | None = None


class ModelSpec(Record):
    """`POST /models/load`: what to load and how."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model_id: str = Field(min_length=1)
    harness: str = "torch"
    source: str | None = None
    quant: str | None = None
    tensor_parallel: int | None = None
    devices: list[int] | None = None
    tool_parser: str | None = None


class ModelInfo(Record):
    """One entry of `GET /models`.

    Attributes:
        quant: what its weights were quantised to while they loaded.
        progress: how much of a running load's stage is done, 0 to 1, where the node says.
        stage: what that load is doing.
    """

    id: str
    harness: str = "torch"
    status: ModelStatus = "loaded"
    devices: list[WireInt] = Field(default_factory=list[WireInt])
    vram_used_mb: WireInt | None = None
    quant: str | None = None
    capabilities: list[str] = Field(default_factory=list[str])
    limit: Limit | None = None
    tool_call: bool = False
    reasoning: bool = False
    servable: Servable | None = None
    progress: float | None = None
    stage: str | None = None


class Cost(Record):
    """USD per million tokens; absent means unpriced, 0.0 means free."""

    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None
