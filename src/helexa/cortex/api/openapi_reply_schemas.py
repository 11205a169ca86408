"""Replies of the gateway's own routes, for the OpenAPI document.

The routes build their replies as dicts. Tests check that a reply has exactly the fields of its class.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from helexa.core.node_reports import (
    Activation,
    Cost,
    DeviceHealth,
    Discovery,
    FailedLoad,
    Limit,
    LocalModel,
    ModelInfo,
    ModelLoad,
    Pull,
)
from helexa.cortex.access.keys import Principal
from helexa.cortex.api.openapi_generation_schemas import Body, Count
from helexa.cortex.ledger.activity_and_usage_totals import Activity


def _fields_of(record: type) -> type[Body]:
    """Return a class with the fields of a dataclass, without defaults."""
    named: dict[str, Any] = {field.name: (field.type, ...) for field in fields(record)}
    return create_model(record.__name__, __base__=Body, **named)


class Progress(Body):
    """Admin schema: progress of a load; unknown values are null."""

    fraction: float | None = None
    stage: str | None = None
    eta_secs: float | None = None


class Location(Body):
    """Schema in `/v1/models`: the state of a model on one node."""

    node: str
    status: str
    vram_estimate_mb: int | None


class Model(Body):
    """Schema in `/v1/models`: a model or an alias, as the gateway sees it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool
    state: Literal["warm", "loading", "recovering", "sleeping", "cold", "unreachable"]
    feasible_on: list[str]
    locations: list[Location]
    capabilities: list[str]
    tool_call: bool
    reasoning: bool
    alias_of: str | None = None
    progress: Progress | None = None
    cost: Cost | None = None
    limit: Limit | None = None
    max_model_len: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


class ModelList(Body):
    """Reply schema of `GET /v1/models`: all models and aliases."""

    object: Literal["list"]
    data: list[Model]


class NodeCounts(Body):
    """Schema in `/health`: numbers of nodes."""

    healthy: Count
    total: Count


class Unservable(Body):
    """Schema in `/health`: a loaded model that cannot serve requests."""

    node: str
    model: str
    reason: str | None = None
    detail: str | None = None


class Health(Body):
    """Reply schema of `GET /health`: the state of the fleet."""

    status: Literal["ok", "impaired", "degraded"]
    nodes: NodeCounts
    unservable: list[Unservable] | None = None


class ComponentState(Body):
    """Schema in `/health/ready`: whether a component is ready."""

    ready: bool
    reason: str | None = None


class Components(Body):
    """Schema in `/health/ready`: the components that must be ready."""

    gateway: ComponentState
    ledger: ComponentState
    nodes: ComponentState


class Readiness(Body):
    """Reply schema of `GET /health/ready`: whether the gateway can serve requests."""

    ready: bool
    components: Components


class Version(Body):
    """Reply schema of `GET /version`: the version of the gateway."""

    package_version: str
    git_sha: str
    git_sha_long: str
    git_dirty: bool | None
    build_timestamp: str | None


class LoadProgress(Progress):
    """Schema in `/api/nodes`: a running or waiting load."""

    model: str


class LoadFailure(Body):
    """Schema in `/api/nodes`: a failed load."""

    model: str
    message: str
    temporary: bool
    times: Count
    retry_at: Count


class Node(Body):
    """Schema in `/api/nodes`: the state of a node, without its health if it is down."""

    name: str
    endpoint: str
    kind: Literal["neuron", "openai"]
    source: Literal["config", "joined"]
    healthy: bool
    cordoned: bool
    misses: Count
    problem: str | None
    models: list[ModelInfo]
    in_flight: dict[str, Count]
    loading: list[str]
    draining: list[str]
    failing: list[str]
    ejected: list[str]
    loads: list[LoadProgress]
    unload_at: dict[str, Count]
    failures: list[LoadFailure]
    discovery: Discovery | None = None
    activation: Activation | None = None
    devices: list[DeviceHealth] | None = None
    load: list[ModelLoad] | None = None
    memory_free_mb: int | None = None
    memory_total_mb: int | None = None
    grantable_mb: int | None = None
    local_revision: str | None = None
    poisoned: list[FailedLoad] | None = None


class NodeList(Body):
    """Reply schema of `GET /api/nodes`: all nodes."""

    nodes: list[Node]


class NewNode(Body):
    """Reply schema of `POST /api/join`: the node that has joined."""

    name: str
    endpoint: str


class RemovedNode(Body):
    """Reply schema of `DELETE /api/nodes/...`: the node was removed."""

    name: str
    removed: bool


class Invitation(Body):
    """Admin reply schema: an invitation for one node."""

    token: str
    name: str | None
    networks: list[str]
    expires_at: float


class NodeState(Body):
    """Reply schema of a cordon or drain: the node's state, running requests and loads."""

    name: str
    cordoned: bool
    in_flight: Count
    loading: Count


class Series(Body):
    """Schema in `/api/history`: values of the fleet, a node or model; null if unknown."""

    name: str | None
    tokens_per_second: list[float | None]
    queued: list[float | None]
    running: list[float | None]
    first_token_ms: list[float | None]
    memory_used_mb: list[float | None]
    memory_total_mb: list[float | None]


class History(Body):
    """Reply schema of `GET /api/history`: measurements of the last hour."""

    interval_secs: Count
    end: Count
    by: Literal["fleet", "node", "model"]
    series: list[Series]


class ModelState(Body):
    """Reply schema of `POST /api/models/load` and `unload`: the result."""

    model: str
    node: str
    status: Literal["loaded", "unloaded"]
    nodes: list[str] | None = None


class ClearedPrefixCache(Body):
    """Admin reply schema: the nodes that have forgotten a model's cached prompts."""

    model: str
    nodes: list[str]
    status: Literal["cleared"]
    deleted_bytes: Count  # size of the prompts that were deleted from the disks of the nodes


class LocalModelState(LocalModel):
    """Schema in `/api/models/local`: a model on a node's disk, loaded or not."""

    status: str


class LocalNode(Body):
    """Schema in `/api/models/local`: the models on the disks of one node."""

    name: str
    healthy: bool
    downloads: bool
    complete: bool
    problems: list[str]
    free_mb: int | None
    total_mb: int | None
    models: list[LocalModelState]


class LocalModelList(Body):
    """Reply schema of `GET /api/models/local`: the models on the disks of all nodes."""

    serves_local: bool
    nodes: list[LocalNode]


class PullState(Pull):
    """Admin reply schema: a download on a node."""

    model_config = Body.model_config

    node: str


class PullList(Body):
    """Admin reply schema: running and ended downloads."""

    pulls: list[PullState]


class UsageRow(Body):
    """Schema in `/api/usage`: sums of charged tokens of one group."""

    requests: Count
    prompt: Count
    completion: Count
    cached: Count
    charged: Count
    estimated: Count
    unpriced: Count
    cost: float | None
    day: Annotated[str | None, Field(json_schema_extra={"format": "date"})] = None
    hour: Annotated[str | None, Field(json_schema_extra={"format": "date-time"})] = None
    account_id: str | None = None
    key_id: str | None = None
    model: str | None = None


class UsageReport(Body):
    """Reply schema of `GET /api/usage`: sums of charged tokens."""

    days: Count
    usage: list[UsageRow]


class Session(Body):
    """Reply schema of `/api/session`: the account and the role of the client.

    `csrf`, the value for the header `x-helexa-csrf`, is only in responses to requests with a session cookie.
    """

    signed_in: bool
    require_auth: bool
    account_id: str | None
    key_id: str | None
    role: Literal["user", "admin"] | None
    reason: str | None
    providers: list[str]
    bench_url: str | None
    config_file: str | None
    links: bool
    csrf: str | None = None
    expires_at: float | None = None


class Key(_fields_of(Principal)):
    """Schema in `/api/keys`: an API key with its limits.

    Only the response that creates the key has the secret, in the field `key`.
    """

    source: Literal["config", "database"]
    hint: str | None
    created_at: float | None
    revoked_at: float | None
    spent: Count
    held: Count
    window_ends_at: float | None
    key: str | None = None


class KeyList(Body):
    """Reply schema of `GET /api/keys`: all keys."""

    keys: list[Key]


class Request(_fields_of(Activity)):
    """Schema in `/api/activity`: a finished request."""

    id: int


class ActivityPage(Body):
    """Reply schema of `GET /api/activity`: the newest finished requests."""

    requests: list[Request]


class Document(Body):
    """Reply schema of `GET /openapi.json`: an OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    servers: list[dict[str, str]]
    paths: dict[str, Any]
    components: dict[str, Any]


EVENT = "server-sent events: `names`, `node`, `models`, `request`, `log`, `dropped` and `end`"
Event = Annotated[str, Field(description=EVENT)]
