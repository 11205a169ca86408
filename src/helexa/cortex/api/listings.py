"""The contents of `/v1/models` and `/api/nodes`."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from helexa.core.catalog import Catalog
from helexa.core.node_reports import Limit
from helexa.cortex.fleet.fleet_view import FleetView, Node, capabilities, files_of, local_ids, profile_of
from helexa.cortex.lifecycle import placement
from helexa.cortex.lifecycle.load_job import Progress
from helexa.cortex.lifecycle.load_queue import LoadFailure, LoadReport
from helexa.cortex.routing import candidates

Entry = dict[str, Any]
State = Literal["warm", "loading", "recovering", "sleeping", "cold", "unreachable"]

_HEALTH_FIELDS = ("memory_free_mb", "memory_total_mb", "grantable_mb", "poisoned", "local_revision")


def model_list(
    view: FleetView,
    catalog: Catalog,
    created: int,
    progress: Callable[[str], Progress | None] = lambda _model: None,
) -> list[Entry]:
    """Return the entries of `/v1/models`: first all models, then the aliases.

    Models come from the catalog, the nodes and the nodes' disks. An entry omits fields that have no known value.

    Args:
        created: value of the field `created` in every entry, in Unix seconds.
        progress: function that returns the load progress of a model, or None if this gateway is not loading the model.
    """
    ids = [profile.id for profile in catalog.models]
    for node in view.nodes:
        ids += [model for model in (*node.models, *node.activating()) if model not in ids]
    ids += local_ids(view, catalog)
    entries = {model: _entry(view, catalog, model, created, progress(model)) for model in ids}
    aliases = [(alias, target) for alias, target in catalog.aliases.items() if target in entries]
    return [*entries.values(), *(entries[target] | {"id": alias, "alias_of": target} for alias, target in aliases)]


def _entry(view: FleetView, catalog: Catalog, model: str, created: int, progress: Progress | None) -> Entry:
    profile = profile_of(view, catalog, model)
    reports = [node.models[model] for node in view.nodes if model in node.models]
    files = None if reports else files_of(view, catalog, model)
    feasible_on = [node.name for node in view.nodes if profile and node.healthy and placement.feasible(profile, node)]
    entry: Entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "helexa",
        # Clients offer users only models with `loaded`. A sleeping model counts, because the next request wakes it.
        "loaded": any(info.status in ("loaded", "sleeping") for info in reports),
        "state": _state(view, model, progress, feasible_on),
        "feasible_on": feasible_on,
        "locations": [location for node in view.nodes for location in _locations(view, node, model)],
        "capabilities": capabilities(view, catalog, model) or (list(files.capabilities) if files else []),
        "tool_call": any(info.tool_call for info in reports) or (files is not None and files.tool_call),
        "reasoning": any(info.reasoning for info in reports) or (files is not None and files.reasoning),
    }
    if progress is not None and entry["state"] == "loading":
        entry["progress"] = progress.json_dict()
    if profile is not None and profile.cost is not None:
        entry["cost"] = profile.cost.json_dict()
    limits = [info.limit for info in reports if info.limit is not None]
    if not limits and profile is not None and profile.limit is not None:
        limits = [profile.limit]
    if limits:
        entry |= _limit(min(limits, key=lambda limit: limit.context))
    return entry


def _state(view: FleetView, model: str, progress: Progress | None, feasible_on: list[str]) -> State:
    """Return the state of a model in `/v1/models`."""
    # A `warm` model can serve requests now. A `sleeping` model wakes at the next request. A `cold` model must be loaded
    # first. An `unreachable` model cannot be loaded: only nodes that are down have it.
    if candidates(view, model):
        return "warm"
    nodes = [node for node in view.nodes if node.healthy]
    statuses = {node.models[model].status for node in nodes if model in node.models}
    if progress is not None or "loading" in statuses or any(model in node.activating() for node in nodes):
        return "loading"
    if statuses & {"recovering", "poisoned"}:
        return "recovering"
    if "sleeping" in statuses:
        return "sleeping"
    is_known = any(model in node.models for node in view.nodes if not node.healthy)
    return "unreachable" if is_known and not statuses and not feasible_on else "cold"


def _locations(view: FleetView, node: Node, model: str) -> list[Entry]:
    info = node.models.get(model)
    if info is not None:
        return [{"node": node.name, "status": info.status, "vram_estimate_mb": info.vram_used_mb}]
    if model in node.activating() or (node.name, model) in view.loading:
        return [{"node": node.name, "status": "loading", "vram_estimate_mb": None}]
    return []


def _limit(limit: Limit) -> Entry:
    flat_limits = {"max_model_len": limit.context, "max_input_tokens": limit.input, "max_output_tokens": limit.output}
    return {"limit": limit.json_dict()} | {name: value for name, value in flat_limits.items() if value is not None}


@dataclass
class Dynamics:
    """The state of one node in `/api/nodes` that changes without a poll."""

    in_flight: dict[str, int] = field(default_factory=dict[str, int])  # number of running requests by model
    loading: list[str] = field(default_factory=list[str])  # models that are loading
    # models that get no new requests, because they will be unloaded
    draining: list[str] = field(default_factory=list[str])
    # models to which no requests of some or all clients are sent, because connections keep failing
    failing: list[str] = field(default_factory=list[str])
    # models that get few requests, because their requests fail on this node but succeed on other nodes
    ejected: list[str] = field(default_factory=list[str])
    # progress of running and waiting loads by model
    loads: dict[str, Progress] = field(default_factory=dict[str, Progress])
    failures: dict[str, LoadFailure] = field(default_factory=dict[str, LoadFailure])  # failed loads by model
    # when idle models will be unloaded (Unix seconds), by model
    unload_at: dict[str, int] = field(default_factory=dict[str, int])


def node_entries(view: FleetView, report: LoadReport) -> dict[str, Entry]:
    """Return the entries of `/api/nodes` by name, in configured order."""
    by_node = dynamics(view, report)
    return {node.name: node_entry(node, by_node[node.name]) for node in view.nodes}


def dynamics(view: FleetView, report: LoadReport) -> defaultdict[str, Dynamics]:
    """Return the state in `/api/nodes` that changes without a poll, by node name."""
    by_node: defaultdict[str, Dynamics] = defaultdict(Dynamics)
    for (name, model), count in view.in_flight.items():
        by_node[name].in_flight[model] = count
    failing = {(name, model) for name, model, _ in view.open}
    ejected = {pair for pair, _ in view.ejected}
    for attribute, pairs in (
        ("loading", view.loading),
        ("draining", view.draining),
        ("failing", failing),
        ("ejected", ejected),
    ):
        for name, model in sorted(pairs):
            getattr(by_node[name], attribute).append(model)
    for (name, model), progress in report.loads.items():
        by_node[name].loads[model] = progress
    for (name, model), failure in report.failures.items():
        by_node[name].failures[model] = failure
    for (name, model), time in report.unload_at.items():
        by_node[name].unload_at[model] = time
    return by_node


def node_entry(node: Node, state: Dynamics) -> Entry:
    """Return a node's entry in `/api/nodes`; without its health if the node is down."""
    entry: Entry = {
        "name": node.name,
        "endpoint": node.endpoint,
        "kind": node.kind,
        "source": "joined" if node.joined else "config",
        "healthy": node.healthy,
        "cordoned": node.cordoned,
        "misses": node.misses,
        "problem": node.problem,
        "models": [info.json_dict() for info in node.models.values()],
        "in_flight": state.in_flight,
        "loading": state.loading,
        "draining": state.draining,
        "failing": state.failing,
        "ejected": state.ejected,
        "loads": [{"model": model, **progress.json_dict()} for model, progress in state.loads.items()],
        "unload_at": state.unload_at,
        "failures": [{"model": model, **failure.json_dict()} for model, failure in state.failures.items()],
    }
    if node.discovery is not None:
        entry["discovery"] = node.discovery.json_dict()
    if node.health is not None and node.healthy:  # the last report of a node that is down is out of date
        health = node.health.json_dict()
        for load in health["models"]:  # clients of `/api/nodes` do not need these long lists
            del load["memory_prefixes"], load["disk_prefixes"]
        entry |= {"activation": health["activation"], "devices": health["devices"], "load": health["models"]}
        entry |= {name: health[name] for name in _HEALTH_FIELDS if name in health}
    return entry
