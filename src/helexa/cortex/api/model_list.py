"""The content of `/v1/models`: models of the catalogue and models that nodes report, merged into one list."""

from collections.abc import Callable
from typing import Any, Literal

from helexa.core.catalogue import Catalogue
from helexa.core.fleet import Limit
from helexa.cortex.fleet.capabilities import capabilities
from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.cortex.lifecycle import placement
from helexa.cortex.lifecycle.load_job import Progress
from helexa.cortex.routing.router import candidates

Entry = dict[str, Any]
State = Literal["warm", "loading", "recovering", "cold"]


def model_list(
    view: FleetView,
    catalogue: Catalogue,
    created: int,
    progress: Callable[[str], Progress | None] = lambda _model: None,
) -> list[Entry]:
    """Return the entries of `/v1/models`.

    There is one entry per model of the catalogue or of a node, and one per alias of such a model. An entry omits fields
    that have no known value.

    Args:
        view: the current state of all nodes and their models.
        catalogue: the models and aliases.
        created: value of the field `created` in every entry, in Unix seconds.
        progress: function that returns the load progress of a model, or None if this gateway is not loading the model.
    """
    ids = [profile.id for profile in catalogue.models]
    for node in view.nodes:
        ids += [model for model in (*node.models, *node.activating()) if model not in ids]
    entries = {model: _entry(view, catalogue, model, created, progress(model)) for model in ids}
    aliases = [(alias, target) for alias, target in catalogue.aliases.items() if target in entries]
    return [*entries.values(), *(entries[target] | {"id": alias} for alias, target in aliases)]


def _entry(view: FleetView, catalogue: Catalogue, model: str, created: int, progress: Progress | None) -> Entry:
    profile = catalogue.profile(model)
    reports = [node.models[model] for node in view.nodes if model in node.models]
    entry: Entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "helexa",
        "loaded": any(info.status == "loaded" for info in reports),
        "state": _state(view, model, progress),
        "feasible_on": [
            node.name for node in view.nodes if profile and node.healthy and placement.feasible(profile, node)
        ],
        "locations": [location for node in view.nodes for location in _locations(view, node, model)],
        "capabilities": capabilities(view, catalogue, model),
        "tool_call": any(info.tool_call for info in reports),
        "reasoning": any(info.reasoning for info in reports),
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


def _state(view: FleetView, model: str, progress: Progress | None) -> State:
    """Return the state of a model. A `warm` model can serve requests now. A `cold` model must be loaded first."""
    if candidates(view, model):
        return "warm"
    nodes = [node for node in view.nodes if node.healthy]
    statuses = {node.models[model].status for node in nodes if model in node.models}
    if progress is not None or "loading" in statuses or any(model in node.activating() for node in nodes):
        return "loading"
    return "recovering" if statuses & {"recovering", "poisoned"} else "cold"


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
