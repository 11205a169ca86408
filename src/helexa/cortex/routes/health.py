"""`GET /health` and `GET /`: how the fleet is."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from helexa.cortex.fleet.fleet import FleetView, Node
from helexa.cortex.gateway import Gateway


async def get_health(request: Request) -> Response:
    """Whether requests can be served; always 200."""
    return _json(fleet_health(_view(request)))


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


def _view(request: Request) -> FleetView:
    gateway: Gateway = request.app.state.gateway
    return gateway.fleet.view()


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
