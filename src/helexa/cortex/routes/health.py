"""`GET /health`, `GET /` and `GET /api/nodes`: how the fleet is."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from helexa.cortex.fleet import FleetView, Node
from helexa.cortex.gateway import Gateway


async def get_health(request: Request) -> Response:
    """Whether requests can be served; always 200."""
    return _json(fleet_health(_view(request)))


async def list_nodes(request: Request) -> Response:
    """Everything known of every node."""
    return _json({"nodes": [_node(node) for node in _view(request).nodes]})


def fleet_health(view: FleetView) -> dict[str, Any]:
    """`degraded` without a healthy node, `impaired` when a healthy one holds a model it cannot serve, else `ok`."""
    healthy = [node for node in view.nodes if node.healthy]
    unservable = [entry for node in healthy for entry in _unservable(node)]
    status = "degraded" if not healthy else "impaired" if unservable else "ok"
    report: dict[str, Any] = {"status": status, "nodes": {"healthy": len(healthy), "total": len(view.nodes)}}
    return report | ({"unservable": unservable} if unservable else {})


def _unservable(node: Node) -> list[dict[str, Any]]:
    return [
        {"node": node.name, "model": info.id}
        | info.servable.model_dump(include={"reason", "detail"}, exclude_none=True)
        for info in node.models.values()
        if info.servable is not None and not info.servable.ok
    ]


def _node(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": node.name,
        "endpoint": node.endpoint,
        "healthy": node.healthy,
        "models": [info.json_dict() for info in node.models.values()],
    }
    if node.discovery is not None:
        entry["discovery"] = node.discovery.json_dict()
    if node.health is not None:
        health = node.health.json_dict()
        entry |= {"activation": health["activation"], "devices": health["devices"], "load": health["models"]}
    return entry


def _view(request: Request) -> FleetView:
    gateway: Gateway = request.app.state.gateway
    return gateway.fleet.view()


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
