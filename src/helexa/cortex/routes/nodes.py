"""`/api/nodes`: endpoints that list, cordon, uncordon and drain nodes."""

import asyncio
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.http.json_response import JsonResponse

MAX_WAIT_SECS = 600.0


async def list_nodes(request: Request) -> Response:
    """Handle `GET /api/nodes`: respond with the state of every node."""
    fleet_view = _fleet(request).view()
    return JsonResponse({"nodes": [_entry(fleet_view, node) for node in fleet_view.nodes]})


async def cordon_node(request: Request) -> Response:
    """Handle `POST /api/nodes/{name}/cordon`: from now on, send no requests and loads to the node.

    Running requests continue.
    """
    return _cordon(request, True)


async def uncordon_node(request: Request) -> Response:
    """Handle `POST /api/nodes/{name}/uncordon`: send requests and loads to the node again."""
    return _cordon(request, False)


async def drain_node(request: Request) -> Response:
    """Handle `POST /api/nodes/{name}/drain`: cordon the node, and wait until its requests and loads have ended.

    Only requests and loads of this gateway are considered. The response is sent after `wait_secs` seconds at the latest
    (query parameter, default and maximum 600). It contains the number of requests and loads that still run. The node
    stays cordoned in any case.
    """
    wait_secs = _wait_secs(request)
    fleet, name = _fleet(request), _set_cordoned(request, True)
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_secs):
            await fleet.emptied(name)
    return JsonResponse(_state(fleet, name))


def _cordon(request: Request, cordoned: bool) -> Response:
    return JsonResponse(_state(_fleet(request), _set_cordoned(request, cordoned)))


def _set_cordoned(request: Request, cordoned: bool) -> str:
    name = request.path_params["name"]
    try:
        _fleet(request).cordon(name, cordoned)
    except KeyError:
        raise ApiError(404, "node_not_found", f"node '{name[:200]}' not found", param="name") from None
    return name


def _wait_secs(request: Request) -> float:
    text = request.query_params.get("wait_secs")
    if text is None:
        return MAX_WAIT_SECS
    if not (text.isascii() and text.isdigit()) or int(text[:9]) > MAX_WAIT_SECS:
        message = f"wait_secs must be an integer from 0 to {MAX_WAIT_SECS:g}"
        raise ApiError(400, "invalid_value", message, param="wait_secs")
    return float(text)


def _state(fleet: Fleet, name: str) -> dict[str, Any]:
    fleet_view = fleet.view()
    return {
        "name": name,
        "cordoned": any(node.cordoned for node in fleet_view.nodes if node.name == name),
        "in_flight": sum(fleet_view.running(name).values()),
        "loading": sum(node == name for node, _ in fleet_view.loading),
    }


def _entry(view: FleetView, node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": node.name,
        "endpoint": node.endpoint,
        "kind": node.kind,
        "healthy": node.healthy,
        "cordoned": node.cordoned,
        "misses": node.misses,
        "models": [info.json_dict() for info in node.models.values()],
        "in_flight": view.running(node.name),
        "loading": sorted(model for name, model in view.loading if name == node.name),
        "draining": sorted(model for name, model in view.draining if name == node.name),
        "failing": sorted(model for name, model in view.open if name == node.name),
    }
    if node.discovery is not None:
        entry["discovery"] = node.discovery.json_dict()
    if node.health is not None:
        health = node.health.json_dict()
        entry |= {"activation": health["activation"], "devices": health["devices"], "load": health["models"]}
    return entry


def _fleet(request: Request) -> Fleet:
    return request.app.state.gateway.fleet
