"""`GET /v1/models` and `GET /v1/models/{id}`.

Clients that send the header `anthropic-version` get Anthropic's format, and other clients get OpenAI's format.
"""

import time

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import model_not_found
from helexa.cortex.access.auth import allows
from helexa.cortex.anthropic.models import VERSION_HEADER, anthropic_model, anthropic_page
from helexa.cortex.api.model_list import Entry, model_list
from helexa.cortex.gateway import Gateway
from helexa.http.json_response import JsonResponse


async def list_models(request: Request) -> Response:
    """Respond with all models and aliases that the key of the request may use."""
    entries = _entries(request)
    if VERSION_HEADER in request.headers:
        return JsonResponse(anthropic_page(entries, request.query_params))
    return JsonResponse({"object": "list", "data": entries})


async def get_model(request: Request) -> Response:
    """Respond with one model or alias, or with 404 if it is unknown or the key may not use it."""
    name: str = request.path_params["model"]
    for entry in _entries(request):
        if entry["id"] == name:
            return JsonResponse(anthropic_model(entry) if VERSION_HEADER in request.headers else entry)
    raise model_not_found(name[:200])


def _entries(request: Request) -> list[Entry]:
    gateway: Gateway = request.app.state.gateway
    catalogue, principal = gateway.catalogue, request.state.principal
    entries = model_list(gateway.fleet.view(), catalogue, int(time.time()), gateway.lifecycle.progress)
    return [entry for entry in entries if allows(principal, catalogue.resolve(entry["id"]))]
