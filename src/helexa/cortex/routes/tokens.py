"""Endpoints for a model's tokenizer. Requests are forwarded to a node that has the model loaded.

These endpoints load no model and charge nothing.
"""

import asyncio
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import (
    ApiError,
    malformed_json,
    missing_model,
    model_not_found,
    service_unavailable,
    unsupported_parameter,
)
from helexa.cortex.access.auth import allows, authorise
from helexa.cortex.access.principal import Principal
from helexa.cortex.gateway import Gateway
from helexa.cortex.observability.request_record import CLIENT_CLOSED_REQUEST
from helexa.cortex.requests.body_bounds import check_containers
from helexa.cortex.requests.body_workers import is_large
from helexa.cortex.requests.request import read_body
from helexa.cortex.requests.rewrite import rewrite
from helexa.cortex.routing.router import WarmRoute, route
from helexa.cortex.serving.service import is_known
from helexa.http.connections.client_disconnect import ClientDisconnected
from helexa.http.connections.request_head import Headers, require_json

TIMEOUT_SECS = 30.0
RETRY_SECS = 5


class _Fields(msgspec.Struct):
    model: str | None = None
    previous_response_id: str | None = None


_fields = msgspec.json.Decoder(_Fields)


async def ask_tokenizer(request: Request) -> Response:
    """Forward `POST /tokenize`, `/detokenize` or `/v1/responses/input_tokens` to a node that has the model loaded."""
    gateway: Gateway = request.app.state.gateway
    headers = request.scope["headers"]
    principal = gateway.authenticator.admit(headers)
    require_json(headers)
    with gateway.rate_limiter.enter(principal):
        try:
            body = await read_body(request.receive, headers, gateway.max_body_bytes)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        fields = await gateway.body_workers.run(_read_large, body) if is_large(body) else _read(body)
        target = await _target(gateway, principal, fields.model, fields.previous_response_id)
        if fields.model != target.model or target.kind != "neuron":  # third-party backends get a single `model`
            run_rewrite = gateway.body_workers.run if is_large(body) else asyncio.to_thread
            body = await run_rewrite(rewrite, body, {"model": target.model})
        async with gateway.prepared_images(target.model, body) as prepared:
            return await _call_tokenizer(gateway, target, principal, request.url.path, prepared.body)


def _read(body: bytes) -> _Fields:
    try:
        return _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed_json(str(error)) from None


def _read_large(body: bytes) -> _Fields:
    check_containers(body)
    return _read(body)


async def get_tokenizer_info(request: Request) -> Response:
    """Forward `GET /tokenizer_info?model=` to a node that has the model loaded."""
    for name in request.query_params:
        if name != "model":
            raise unsupported_parameter(name)
    gateway: Gateway = request.app.state.gateway
    principal: Principal | None = request.state.principal
    with gateway.rate_limiter.enter(principal):
        target = await _target(gateway, principal, request.query_params.get("model"))
        path = f"{request.url.path}?model={quote(target.model, safe='')}"
        return await _call_tokenizer(gateway, target, principal, path)


async def _target(
    gateway: Gateway, principal: Principal | None, name: str | None, previous: str | None = None
) -> WarmRoute:
    """Return the node to which a tokenizer request is forwarded.

    Args:
        gateway: the gateway.
        principal: account and key of the request, or None if anonymous.
        name: a model id or an alias. None selects the only loaded model that the key may use, because clients for
            single-model servers omit the name.
        previous: id of a stored response, or None. The node that stores the response is preferred.
    """
    fleet_view = gateway.fleet.view()
    model = _only_model(gateway, principal) if not name else gateway.catalogue.resolve(name)
    authorise(principal, model, name or model)
    if not is_known(gateway, fleet_view, model) and any(node.healthy for node in fleet_view.nodes):
        raise model_not_found((name or model)[:200])
    if principal is not None:
        await gateway.ledger.check_budget(principal)
    holder = None if previous is None else fleet_view.holder(previous)
    other_nodes = set() if holder is None else {node.name for node in fleet_view.nodes} - {holder.name}
    target = route(fleet_view, model, avoid=other_nodes) or route(fleet_view, model)
    if target is None:
        raise service_unavailable(f"model '{model}' is not loaded; a generation request loads it", RETRY_SECS)
    return target


def _only_model(gateway: Gateway, principal: Principal | None) -> str:
    fleet_view = gateway.fleet.view()
    models = {model for node in fleet_view.nodes for model in node.models if route(fleet_view, model) is not None}
    allowed_models = [model for model in models if allows(principal, model)]
    if len(allowed_models) != 1:
        raise missing_model()
    return allowed_models[0]


async def _call_tokenizer(
    gateway: Gateway, target: WarmRoute, principal: Principal | None, path: str, body: bytes = b""
) -> Response:
    identity: Headers = []
    if principal is not None and target.kind == "neuron":
        identity = [(name.encode(), value.encode()) for name, value in principal.headers().items()]
    node_response = None
    try:
        async with asyncio.timeout(TIMEOUT_SECS):
            node_response = await gateway.calls.call(target, path, body, b"POST" if body else b"GET", identity)
    except TimeoutError:
        pass
    if node_response is None:
        message = f"node '{target.node}' did not respond"
        raise ApiError(502, "upstream_connection_error", message, type="api_error")
    status, content = node_response
    return Response(content, status, media_type="application/json")
