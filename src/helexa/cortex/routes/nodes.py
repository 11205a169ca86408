"""`/api/nodes`: endpoints that list, cordon, uncordon and drain nodes."""

import asyncio
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError
from helexa.cortex.api.node_list import node_entries
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.gateway import Gateway
from helexa.http.json_response import JsonResponse

MAX_WAIT_SECS = 600.0


async def list_nodes(request: Request) -> Response:
    """Handle `GET /api/nodes`: respond with the state of every node."""
    gateway: Gateway = request.app.state.gateway
    return JsonResponse({"nodes": list(node_entries(gateway.fleet.view(), gateway.lifecycle.loads()).values())})


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
    wait_secs = read_wait_secs(request)
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
        raise node_not_found(name) from None
    return name


def node_not_found(name: str) -> ApiError:
    """Return the 404 error for a node that is not configured."""
    return ApiError(404, "node_not_found", f"node '{name[:200]}' not found", param="name")


def read_wait_secs(request: Request) -> float:
    """Return the query parameter `wait_secs`, or `MAX_WAIT_SECS` if it is absent.

    Raises:
        ApiError: 400 if the value is not an integer from 0 to `MAX_WAIT_SECS`.
    """
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


def _fleet(request: Request) -> Fleet:
    return request.app.state.gateway.fleet
