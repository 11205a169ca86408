"""`POST /v1/messages/count_tokens`: the exact token count if a node has the model loaded, else an estimate.

The endpoint loads no model and charges nothing.
"""

import asyncio
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError, model_not_found, service_unavailable
from helexa.cortex.access.auth import authorise
from helexa.cortex.access.principal import Principal
from helexa.cortex.anthropic.count import TOKENIZE_PATH, CountRequest, count_tokens
from helexa.cortex.anthropic.errors import error_headers, to_anthropic_error
from helexa.cortex.gateway import Gateway
from helexa.cortex.requests.body_jobs import read_count
from helexa.cortex.requests.request import read_body
from helexa.cortex.routing.router import RETRY_OPEN, route
from helexa.cortex.serving.service import is_known
from helexa.http.connections.client_disconnect import ClientDisconnected
from helexa.http.connections.request_head import request_id, require_json

TIMEOUT_SECS = 5.0


async def count_message_tokens(request: Request) -> Response:
    """Respond with the token count of the prompt in the request, or with an error in Anthropic's format."""
    name = request_id(request.scope["headers"])
    try:
        body, status, headers = await _count(request), 200, dict[str, str]()
    except ClientDisconnected:
        return Response(status_code=499)
    except ApiError as error:
        body, status, headers = orjson.dumps(to_anthropic_error(error, name)), error.status, error_headers(error)
    return Response(body, status, {"x-request-id": name, "request-id": name, **headers}, "application/json")


async def _count(request: Request) -> bytes:
    gateway: Gateway = request.app.state.gateway
    headers = request.scope["headers"]
    principal = gateway.authenticator.admit(headers)
    require_json(headers)
    with gateway.rate_limiter.enter(principal):
        body = await read_body(request.receive, headers, gateway.max_body_bytes)
        return await _count_prompt(gateway, principal, await read_count(gateway.body_workers, body))


async def _count_prompt(gateway: Gateway, principal: Principal | None, count: CountRequest) -> bytes:
    model = gateway.catalogue.resolve(count.model)
    authorise(principal, model, count.model)
    fleet_view = gateway.fleet.view()
    if not is_known(gateway, fleet_view, model):
        if any(node.healthy for node in fleet_view.nodes):
            raise model_not_found(count.model[:200])
        raise service_unavailable(f"no node is up that could serve model '{count.model[:200]}'", RETRY_OPEN)
    if principal is not None:
        await gateway.ledger.check_budget(principal)
    target = route(fleet_view, model)

    async def ask(body: bytes) -> tuple[int, bytes] | None:
        if target is None:
            return None
        try:
            async with asyncio.timeout(TIMEOUT_SECS):
                return await gateway.calls.call(target, TOKENIZE_PATH, body)
        except TimeoutError:
            return None

    async with gateway.prepared_images(model, count.body) as prepared:
        return await count_tokens(replace(count, body=prepared.body), model, ask)
