"""`GET /health` and `GET /`: how the fleet is. `GET /health/ready`: whether this gateway can serve requests now."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helexa.cortex.fleet.fleet import FleetView, Node
from helexa.cortex.gateway import Gateway
from helexa.http.json_response import JsonResponse


async def get_health(request: Request) -> Response:
    """Report the state of the fleet; always 200, since it shows that this process lives."""
    return JsonResponse(fleet_health(_view(request)))


async def get_readiness(request: Request) -> Response:
    """Report whether this gateway can serve requests now: 200, or 503 if a component fails.

    The components are the ledger, whose database must accept a write, and the nodes, of which one must be healthy.
    Causes are not part of the answer, since the route is public; the log has them.
    """
    gateway: Gateway = request.app.state.gateway
    failing: dict[str, str] = {}
    if not await gateway.ledger.writable():
        failing["ledger"] = "the ledger's database cannot be written"
    nodes = _view(request).nodes
    if not any(node.healthy for node in nodes):
        failing["nodes"] = f"none of {len(nodes)} nodes is healthy"
    components = {
        name: {"ready": name not in failing} | ({"reason": failing[name]} if name in failing else {})
        for name in ("ledger", "nodes")
    }
    return JsonResponse({"ready": not failing, "components": components}, 503 if failing else 200)


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
