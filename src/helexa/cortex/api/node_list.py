"""The content of `/api/nodes`: the state of every node, with the loads and failed loads of this gateway."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.cortex.lifecycle.load_job import Progress
from helexa.cortex.lifecycle.load_report import LoadFailure, LoadReport

Entry = dict[str, Any]


@dataclass
class Dynamics:
    """The state of one node that changes without a poll: requests and loads of this gateway.

    Attributes:
        in_flight: number of running requests by model.
        loading, draining, failing: models that are loading, that will be unloaded, and that get no requests because
            requests keep failing.
        loads: progress of running and waiting loads by model.
        failures: failed loads by model.
    """

    in_flight: dict[str, int] = field(default_factory=dict[str, int])
    loading: list[str] = field(default_factory=list[str])
    draining: list[str] = field(default_factory=list[str])
    failing: list[str] = field(default_factory=list[str])
    loads: dict[str, Progress] = field(default_factory=dict[str, Progress])
    failures: dict[str, LoadFailure] = field(default_factory=dict[str, LoadFailure])


def node_entries(view: FleetView, report: LoadReport) -> dict[str, Entry]:
    """Return the entries of all nodes by name, in configured order."""
    by_node = dynamics(view, report)
    return {node.name: node_entry(node, by_node[node.name]) for node in view.nodes}


def dynamics(view: FleetView, report: LoadReport) -> defaultdict[str, Dynamics]:
    """Return the state that changes without a poll, by node name."""
    by_node: defaultdict[str, Dynamics] = defaultdict(Dynamics)
    for (name, model), count in view.in_flight.items():
        by_node[name].in_flight[model] = count
    for attribute, pairs in (("loading", view.loading), ("draining", view.draining), ("failing", view.open)):
        for name, model in sorted(pairs):
            getattr(by_node[name], attribute).append(model)
    for (name, model), progress in report.loads.items():
        by_node[name].loads[model] = progress
    for (name, model), failure in report.failures.items():
        by_node[name].failures[model] = failure
    return by_node


def node_entry(node: Node, state: Dynamics) -> Entry:
    """Return the entry of one node."""
    entry: Entry = {
        "name": node.name,
        "endpoint": node.endpoint,
        "kind": node.kind,
        "healthy": node.healthy,
        "cordoned": node.cordoned,
        "misses": node.misses,
        "problem": node.problem,
        "models": [info.json_dict() for info in node.models.values()],
        "in_flight": state.in_flight,
        "loading": state.loading,
        "draining": state.draining,
        "failing": state.failing,
        "loads": [{"model": model, **progress.json_dict()} for model, progress in state.loads.items()],
        "failures": [{"model": model, **failure.json_dict()} for model, failure in state.failures.items()],
    }
    if node.discovery is not None:
        entry["discovery"] = node.discovery.json_dict()
    if node.health is not None:
        health = node.health.json_dict()
        entry |= {"activation": health["activation"], "devices": health["devices"], "load": health["models"]}
        entry |= {name: health[name] for name in _HEALTH_FIELDS if name in health}
    return entry


_HEALTH_FIELDS = ("memory_free_mb", "memory_total_mb", "poisoned")
