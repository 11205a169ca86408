"""`/api/models/load` and `/api/models/unload`: administrators load and unload models."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError
from helexa.cortex.api.admin_requests import ModelLoadRequest, ModelUnloadRequest
from helexa.cortex.gateway import Gateway
from helexa.cortex.routes.nodes import node_not_found, read_wait_secs
from helexa.http.json_response import JsonResponse

_PRIORITY = 2  # above the requests of clients


@dataclass(frozen=True)
class _Administrator:
    """An administrator's request that waits for a load."""

    priority: int = _PRIORITY
    enqueued: float = field(default_factory=time.monotonic)


async def load_model(request: Request) -> Response:
    """Load a model, and respond when it is loaded, or with an error after `wait_secs` seconds at the latest."""
    gateway: Gateway = request.app.state.gateway
    wait_secs = read_wait_secs(request)
    body = await ModelLoadRequest.read(request)
    if body.node is not None:
        _check_loadable(gateway, body.node)
    model = gateway.catalogue.resolve(body.model)
    target = await gateway.lifecycle.load(model, body.node, _Administrator(), wait_secs)
    return JsonResponse({"model": model, "node": target.node, "status": "loaded"})


async def unload_model(request: Request) -> Response:
    """Unload a model from a node when its running requests have ended, and respond when it is unloaded."""
    gateway: Gateway = request.app.state.gateway
    body = await ModelUnloadRequest.read(request)
    _check_loadable(gateway, body.node)
    model = gateway.catalogue.resolve(body.model)
    await gateway.lifecycle.unload(model, body.node)
    return JsonResponse({"model": model, "node": body.node, "status": "unloaded"})


def _check_loadable(gateway: Gateway, name: str) -> None:
    node = next((node for node in gateway.fleet.view().nodes if node.name == name), None)
    if node is None:
        raise node_not_found(name)
    if node.kind != "neuron":
        message = f"node '{name}' is a third-party backend, which loads its models itself"
        raise ApiError(409, "third_party_backend", message, param="node")
    if not node.healthy:
        reason = f": {node.problem}" if node.problem else ""
        raise ApiError(503, "node_down", f"node '{name}' is down{reason}", type="api_error", retry_after=5)
