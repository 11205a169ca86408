"""Serve `GET /version`, `GET /discovery`, `GET /health` and `GET /health/ready`."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.http.json_response import JsonResponse
from helexa.http.readiness import readiness
from helexa.neuron.hardware.build_info import build_facts
from helexa.neuron.hardware.discovery import discover


async def version(request: Request) -> Response:
    """Handle `GET /version`: return the versions of helexa, Python, torch and Triton."""
    return JsonResponse(await asyncio.to_thread(build_facts))


async def discovery(request: Request) -> Response:
    """Handle `GET /discovery`: return the hardware of the machine, the node's limits, and the hosts of its group."""
    facts = await asyncio.to_thread(discover)
    group = request.app.state.group
    limits = {
        "hosts": None if group is None else group.connected_hosts(),
        "max_prompt_tokens": request.app.state.max_prompt_tokens,
        "max_tensor_parallel": request.app.state.max_tensor_parallel(facts),
    }
    return JsonResponse(facts.model_copy(update=limits).json_dict())


async def health(request: Request) -> Response:
    """Handle `GET /health`: return the state of memory, devices and loads, and the request load of each model."""
    return JsonResponse(request.app.state.health.report().json_dict())


async def ready(request: Request) -> Response:
    """Handle `GET /health/ready`: return status 200 if the node accepts requests now, else status 503.

    A node is ready if it does not shut down, and has tried to load each of its default models. The response contains no
    names of models, because the route needs no key.
    """
    state = request.app.state
    loading = state.activation.snapshot().state != "ready"
    return readiness(
        {
            "node": "the node is shutting down" if state.registry.draining else None,
            "models": "the default models are loading" if loading else None,
        }
    )


routes = [
    Route("/version", version),
    Route("/discovery", discovery),
    Route("/health", health),
    Route("/health/ready", ready),
]
