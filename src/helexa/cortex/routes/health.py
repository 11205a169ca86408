"""Health endpoints, and the version of the gateway.

`GET /health` and `GET /` return the state of the fleet. `GET /health/ready` returns whether this gateway can serve
requests now. `GET /version` returns the version and git commit of helexa.
"""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.version import build_identity
from helexa.cortex.fleet.fleet import FleetView, Node
from helexa.cortex.gateway import Gateway
from helexa.http.json_response import JsonResponse
from helexa.http.readiness import readiness


async def get_health(request: Request) -> Response:
    """Respond with the state of the fleet.

    The HTTP status is 200 even if no node is healthy, because the gateway itself is alive.
    """
    return JsonResponse(fleet_health(_view(request)))


async def get_readiness(request: Request) -> Response:
    """Respond with status 200 if this gateway can serve requests now, else with status 503.

    The gateway is ready if it does not shut down, the ledger's database accepts a write, and at least one node is
    healthy. The response contains no error details, because the route is public.
    """
    gateway: Gateway = request.app.state.gateway
    nodes = _view(request).nodes
    return readiness(
        {
            "gateway": "the gateway is shutting down" if gateway.drain.begun else None,
            "ledger": None if await gateway.ledger.writable() else "the ledger's database is not writable",
            "nodes": None if any(node.healthy for node in nodes) else f"none of {len(nodes)} nodes is healthy",
        }
    )


async def get_version(request: Request) -> Response:
    """Respond with the version, git commit and build time of the gateway."""
    return JsonResponse(await asyncio.to_thread(build_identity))


def fleet_health(view: FleetView) -> dict[str, Any]:
    """Return the state of the fleet as JSON: its status, the node counts, and the models that nodes cannot serve.

    The field `status` has one of these values:

    * `degraded`: no node is healthy.
    * `impaired`: a healthy node reports a model that it cannot serve now.
    * `ok`: none of the above.
    """
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
