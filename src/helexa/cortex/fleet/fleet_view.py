"""Read-only state of the nodes and their models, for routing and placement.

The functions at the end combine the reports of nodes about a model, and the files on their disks, with the catalog.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from helexa.core.catalog import DEFAULT_RESIDENCY, Catalog, Profile
from helexa.core.node_reports import Discovery, Health, LocalModel, LocalModels, ModelInfo
from helexa.cortex.fleet.breaker import ANY, Key, Pair
from helexa.cortex.fleet.ejection import EjectionKey, Requester

_LATEST = ":latest"

MISSES_TO_DOWN = 3
VISION = "vision"


class LocalIndex:
    """Index of the usable models on the disks of all nodes, by id and name.

    Args:
        reports: the models of each node, by node name.
    """

    def __init__(self, reports: Mapping[str, Iterable[LocalModel]] = MappingProxyType({})) -> None:
        models: defaultdict[str, dict[str, LocalModel]] = defaultdict(dict)
        names: defaultdict[str, set[str]] = defaultdict(set)
        short_names: defaultdict[str, set[str]] = defaultdict(set)
        for node, locals_of_node in reports.items():
            for local in locals_of_node:
                if not local.usable:
                    continue
                models[local.id][node] = local
                for name in (local.id, *local.names):
                    names[name.lower()].add(local.id)
                    short_names[name.rpartition("/")[2].lower()].add(local.id)
        # reports of the nodes about the files of each model: first by model id, then by node name
        self.models: Mapping[str, Mapping[str, LocalModel]] = MappingProxyType(dict(models))
        self._names = dict(names)
        self._short_names = dict(short_names)

    def find(self, name: str) -> str | None:
        """Return the id of the only model that `name` can mean.

        Return None if `name` matches no model, or several.

        The name is a model id, a source id, or one of these without the organization. Case does not matter. Ollama's
        tag `:latest` at the end of the name is ignored.
        """
        if name in self.models:
            return name
        plain = name.removesuffix(_LATEST).lower()
        for names in (self._names, self._short_names):
            ids = names.get(plain, ())
            if ids:
                return next(iter(ids)) if len(ids) == 1 else None
        return None

    def names(self, model: str) -> set[str]:
        """Return the further names under which nodes have the model `model` on disk."""
        return {name for local in self.models.get(model, {}).values() for name in local.names}


@dataclass(frozen=True)
class Node:
    """State of one node."""

    name: str
    endpoint: str
    kind: str = "neuron"  # `neuron`, or `openai` for a third-party server with an OpenAI-compatible API
    cordoned: bool = False  # True if the node gets no new requests and loads
    joined: bool = False  # whether the node joined with an invitation, and is not in the configuration
    allowed_hosts: frozenset[str] = frozenset()  # hosts that may serve the node's models besides the host of `endpoint`
    polled: bool = False  # True after the first successful poll. Before it, the node's models are unknown.
    # False before the first successful poll, and after `MISSES_TO_DOWN` consecutive failed polls. A node that is too
    # busy to answer its polls in time stays healthy while other signs show that it is alive.
    healthy: bool = False
    misses: int = 0  # number of failed polls since the last successful poll
    problem: str | None = None  # why the last poll failed; None if it succeeded, and before the first poll
    discovery: Discovery | None = None  # last reported hardware; None before the first report
    # last reported health, with running requests and free memory; None before the first report
    health: Health | None = None
    # last reported models, by id; kept while the node is down
    models: Mapping[str, ModelInfo] = field(default_factory=dict[str, ModelInfo])
    # last reported models on the node's disks; None before the first report, and for nodes that report none
    local: LocalModels | None = None
    # Base URL of each model's API, by model id. The default for other models is `endpoint`.
    urls: Mapping[str, str] = field(default_factory=dict[str, str])
    # number of running and queued requests of other clients at the last poll, by model id
    other_requests: Mapping[str, int] = field(default_factory=dict[str, int])
    read_at: float | None = None  # when the poll that reported `health` began (`time.monotonic`)

    @property
    def is_unresponsive(self) -> bool:
        """Whether the node counts as busy: it does not answer its polls, but is not down."""
        return self.healthy and self.misses >= MISSES_TO_DOWN

    def url(self, model: str) -> str:
        """Return the base URL of the API that serves `model` on this node."""
        return self.urls.get(model, self.endpoint)

    def activating(self) -> list[str]:
        """Return the ids of the models that the node is loading or has queued for loading."""
        if self.health is None:
            return []
        activation = self.health.activation
        return [*([activation.in_progress] if activation.in_progress else []), *activation.pending]


def machine_of(node: Node) -> str | None:
    """Return the machine whose main memory holds a node's models.

    Return None if the node has GPUs, or its machine is unknown.
    """
    facts = node.discovery
    return None if facts is None or facts.devices else facts.machine


def shares_memory(node: Node, other: Node) -> bool:
    """Return whether two nodes run models in the same machine's main memory."""
    machine = machine_of(node)
    return machine is not None and machine == machine_of(other) and node.name != other.name


@dataclass(frozen=True)
class FleetView:
    """State of all nodes, as input of one routing or placement decision.

    The mappings `in_flight`, `loaded_at` and `used_at` are live: other tasks may change them at every `await`. Code
    that makes a decision must therefore not await between two reads. The keys "by (node, model)" are pairs (node name,
    model id).
    """

    nodes: tuple[Node, ...]  # the nodes in configured order
    # number of running requests of this gateway, by (node, model)
    in_flight: Mapping[Pair, int] = field(default_factory=dict[Pair, int])
    loading: frozenset[Pair] = frozenset()  # (node, model) pairs that this gateway is loading
    # (node, model) pairs that get no new requests because the model will be unloaded
    draining: frozenset[Pair] = frozenset()
    # When a model was loaded (`time.monotonic`), by (node, model). Loads before the gateway's first poll of the node
    # are missing.
    loaded_at: Mapping[Pair, float] = field(default_factory=dict[Pair, float])
    # when a node last had a request for the model (`time.monotonic`), by (node, model)
    used_at: Mapping[Pair, float] = field(default_factory=dict[Pair, float])
    # (node, model, client) of open circuit breakers. The node gets no requests of this client. `ANY` means all clients.
    open: frozenset[Key] = frozenset()
    # (node, model) pairs that failed or were busy recently. They get requests only if no other node can serve.
    cooling_down: frozenset[Pair] = frozenset()
    # (node, model) pairs with errors that other nodes did not have, with the client and the API path of the requests.
    # For this client and path, the pairs get requests only if no other node can serve.
    ejected: frozenset[EjectionKey] = frozenset()
    local: LocalIndex = field(default_factory=LocalIndex)  # the usable models on the disks of all nodes
    serves_local: bool = False  # whether the gateway loads the models in `local` on demand

    def holder(self, response: str) -> Node | None:
        """Return the node that gave out the response id `response`; None if unknown."""
        for node in self.nodes:
            prefix = node.health.responses if node.health is not None else None
            if prefix and response.startswith(prefix):
                return node
        return None

    def load(self, node: Node, model: str) -> int:
        """Return the number of requests for `model` on `node`.

        It includes this gateway's running requests, and other clients' requests at the last poll.
        """
        return self.in_flight.get((node.name, model), 0) + node.other_requests.get(model, 0)

    def is_open(self, name: str, model: str, client: str) -> bool:
        """Return whether the node gets no requests of `client` for `model` (open breaker)."""
        return bool(self.open) and ((name, model, ANY) in self.open or (name, model, client) in self.open)

    def is_ejected(self, name: str, model: str, requester: Requester) -> bool:
        """Return whether other nodes are preferred for the requester's requests."""
        if not self.ejected:
            return False
        pair = (name, model)
        return (pair, requester) in self.ejected or (pair, requester._replace(client=ANY)) in self.ejected

    def running(self, name: str) -> dict[str, int]:
        """Return the number of this gateway's running requests on a node, by model."""
        return {model: count for (node, model), count in self.in_flight.items() if node == name}

    def has_model(self, model: str) -> bool:
        """Return whether any node lists the model or is loading it."""
        return any(model in node.models or model in node.activating() for node in self.nodes)

    def knows(self, model: str) -> bool:
        """Return whether any node has the model, or may load it from its disks."""
        return self.has_model(model) or (self.serves_local and model in self.local.models)

    def local_model(self, node: Node, model: str) -> LocalModel | None:
        """Return the usable files of a model on a node's disks; None without such files."""
        return self.local.models.get(model, {}).get(node.name)


@dataclass(frozen=True)
class Report:
    """The result of one successful poll: the state of a node and of its models."""

    models: Mapping[str, ModelInfo]  # the node's models, by id
    # running requests and free memory; None if they were not requested or the request failed
    health: Health | None = None
    discovery: Discovery | None = None  # the node's hardware; None if it was not requested or the request failed
    # base URL of each model's API, by model id, as far as known
    urls: Mapping[str, str] = field(default_factory=dict[str, str])
    # the models on the node's disks; None if they were not requested or the request failed
    local: LocalModels | None = None


def capabilities(view: FleetView, catalog: Catalog, model: str) -> list[str]:
    """Return a model's capabilities: all that nodes report, else the catalog's, or []."""
    profile = catalog.profile(model)
    reports = [node.models[model].capabilities for node in view.nodes if model in node.models]
    # The nodes know the files that they have loaded, so their reports take precedence over the catalog.
    reported = list(dict.fromkeys(name for names in reports for name in names))
    return reported or (list(profile.capabilities) if profile else [])


def nodes_without_vision(view: FleetView, model: str) -> set[str]:
    """Return the names of nodes that report that a model accepts no images."""
    reports = {node.name: node.models[model].capabilities for node in view.nodes if model in node.models}
    return {name for name, names in reports.items() if names and VISION not in names}


def sees_images(view: FleetView, catalog: Catalog, model: str) -> bool | None:
    """Return whether a model accepts images on at least one node; None if unknown."""
    names = capabilities(view, catalog, model)
    return VISION in names if names else None


def local_profile(view: FleetView, model: str, *, requested: bool = False) -> Profile | None:
    """Return the profile to load a model from the disks of nodes in the view.

    Return None if no node has usable files of the model, or the load is not allowed.

    Args:
        requested: True if an administrator requests the load. The load is then allowed even if `serves_local` is False.
    """
    reports = view.local.models.get(model) if view.serves_local or requested else None
    if not reports:
        return None
    return Profile.model_construct(id=model, pinned_on=list(reports), residency_priority=DEFAULT_RESIDENCY)


def is_sleeping(node: Node, model: str) -> bool:
    """Return whether a model sleeps on the node, according to the fleet view."""
    info = node.models.get(model)
    return info is not None and info.status == "sleeping"


def sleeping_profile(view: FleetView, model: str) -> Profile | None:
    """Return the profile to wake a model that sleeps on nodes; None if it does not."""
    names = [node.name for node in view.nodes if is_sleeping(node, model)]
    if not names:
        return None
    return Profile.model_construct(id=model, pinned_on=names, residency_priority=DEFAULT_RESIDENCY)


def profile_of(view: FleetView, catalog: Catalog, model: str, *, requested: bool = False) -> Profile | None:
    """Return the profile to load or wake a model; None if no source has the model.

    The sources are the catalog, the disks of nodes (see `local_profile`), and sleeping models.
    """
    return catalog.profile(model) or local_profile(view, model, requested=requested) or sleeping_profile(view, model)


def same_files(view: FleetView, catalog: Catalog, model: str) -> str | None:
    """Return the id of a listed or loaded model with the files of `model`, or None.

    A listed model is a model in the catalog. The result is None if `model` itself is listed or loaded.
    """
    # A model that was loaded as `org/name:Q4_K_M` may be on the disk as `org/name`. It must not be loaded twice.
    if catalog.profile(model) is not None or view.has_model(model):
        return None
    names = view.local.names(model)
    return catalog.listed_as(names) or next((name for name in sorted(names) if view.has_model(name)), None)


def find_local(view: FleetView, catalog: Catalog, name: str) -> str | None:
    """Return the id of the model on nodes' disks that `name` means.

    If a listed or loaded model has the same files, return its id (see `same_files`). Return None if the disks have no
    such model, or the gateway does not serve the models on disks.
    """
    model = view.local.find(name) if view.serves_local else None
    return None if model is None else same_files(view, catalog, model) or model


def local_ids(view: FleetView, catalog: Catalog) -> list[str]:
    """Return the sorted ids of models on nodes' disks; empty unless `serves_local`.

    A model is left out if a listed or loaded model with another id has the same files (see `same_files`).
    """
    if not view.serves_local:
        return []
    return [model for model in sorted(view.local.models) if same_files(view, catalog, model) is None]


def files_of(view: FleetView, catalog: Catalog, model: str) -> LocalModel | None:
    """Return a node's report about a model's files; None if no node has the files."""
    profile = catalog.profile(model)
    source = None if profile is None else profile.full_source()
    local_id = None if source is None else view.local.find(source)
    reports = view.local.models.get(local_id or model) or view.local.models.get(view.local.find(model) or "") or {}
    return next(iter(reports.values()), None)


def estimated_mb(view: FleetView, profile: Profile | None, model: str, node: Node | None) -> int | None:
    """Return the MB of memory that a model on nodes' disks needs, or None if unknown.

    The estimate of `node` is preferred to the largest estimate of other nodes. A catalog entry that sets a
    quantization for safetensors needs less memory than its files, so there is no estimate for it. The memory of a draft
    model is included if its files are on a disk.
    """
    source = None if profile is None else profile.full_source()
    local_id = view.local.find(source) if source is not None else None
    reports = view.local.models.get(local_id or model, {})
    if profile is not None and profile.quant is not None:
        reports = {name: local for name, local in reports.items() if local.form.lower() == profile.quant.lower()}
    sizes_mb = {name: local.memory_mb for name, local in reports.items() if local.memory_mb is not None}
    size_mb = _of_node(sizes_mb, node)
    draft = None if profile is None or profile.draft_model is None else view.local.find(profile.draft_model)
    drafts = {name: local.memory_mb or 0 for name, local in view.local.models.get(draft or "", {}).items()}
    return None if size_mb is None else size_mb + (_of_node(drafts, node) or 0)


def _of_node(sizes_mb: Mapping[str, int], node: Node | None) -> int | None:
    return sizes_mb[node.name] if node is not None and node.name in sizes_mb else max(sizes_mb.values(), default=None)
