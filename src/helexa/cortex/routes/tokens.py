"""Endpoints that count tokens, or use a model's tokenizer.

The endpoints load no model and charge nothing. Requests are forwarded to a node that has the model loaded.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import quote

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError, malformed_json, missing_model, service_unavailable, unsupported_parameter
from helexa.core.wire.responses_input import referenced_response
from helexa.cortex.access.auth import allows, authorize
from helexa.cortex.access.keys import Principal
from helexa.cortex.anthropic.message_and_errors import error_headers, to_anthropic_error
from helexa.cortex.anthropic.request_settings_and_token_count import CountRequest
from helexa.cortex.forwarding.request import rewrite
from helexa.cortex.forwarding.request_body_limit_and_workers import check_containers, is_large, read_body
from helexa.cortex.forwarding.token_queries import TOKENIZE_PATH, parse_count
from helexa.cortex.gateway import Gateway
from helexa.cortex.request_record import CLIENT_CLOSED_REQUEST
from helexa.cortex.routes.body_translation import read_count
from helexa.cortex.routing import RETRY_OPEN, WarmRoute, route, unknown_model
from helexa.cortex.serve_request import find_model
from helexa.cortex.upstream.error_responses import for_client, read_error, says_model_is_gone
from helexa.http.headers import Headers, request_id, require_json
from helexa.http.request_cycle_and_disconnects import ClientDisconnected

TIMEOUT_SECS = 30.0
RETRY_SECS = 5


class _Fields(msgspec.Struct):
    model: str | None = None
    previous_response_id: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"null")


_fields = msgspec.json.Decoder(_Fields)


async def ask_tokenizer(request: Request) -> Response:
    """Forward a tokenizer request to a node that has the model loaded."""
    gateway: Gateway = request.app.state.gateway
    headers = request.scope["headers"]
    principal = gateway.authenticator.admit(headers)
    require_json(headers)
    with gateway.rate_limiter.enter(principal):
        try:
            body = await read_body(request.receive, headers, gateway.max_body_bytes)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        name, stored = await gateway.body_workers.run(_read_large, body) if is_large(body) else _read(body)
        target = await _target(gateway, principal, name, stored)
        # For a third-party backend, rewrite the body even if the model name is the same. The rewrite removes repeated
        # `model` fields, because the backend might read a different one of these fields than the gateway.
        if name != target.model or target.kind != "neuron":
            run_rewrite = gateway.body_workers.run if is_large(body) else asyncio.to_thread
            body = await run_rewrite(rewrite, body, {"model": target.model})
        async with gateway.prepared_images(target.model, body) as prepared:
            return await _call_tokenizer(gateway, target, principal, request.url.path, prepared.body)


def _read(body: bytes) -> tuple[str | None, str | None]:
    """Return a request's model name, and the id of the stored response it refers to."""
    try:
        fields = _fields.decode(body)
        return fields.model, referenced_response(fields.previous_response_id, fields.input)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed_json(str(error)) from None


def _read_large(body: bytes) -> tuple[str | None, str | None]:
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
    gateway: Gateway, principal: Principal | None, name: str | None, stored: str | None = None
) -> WarmRoute:
    """Return the node to which a tokenizer request is forwarded.

    Args:
        principal: account and key of the request, or None if anonymous.
        name: a model id or an alias. None selects the only loaded model that the key may use, because clients for
            single-model servers omit the name.
        stored: id of the stored response that the request refers to; None if it refers to none. The node that stores
            the response is preferred.
    """
    fleet_view, model, model_known = await find_model(gateway, name or _only_model(gateway, principal))
    authorize(principal, model, name or model)
    if not model_known and any(node.healthy for node in fleet_view.nodes):
        raise unknown_model(fleet_view, name or model)
    # Counting tokens is not charged, but a key whose budget is used up may not count either.
    if principal is not None:
        await gateway.ledger.check_budget(principal)
    holder = None if stored is None else fleet_view.holder(stored)
    other_nodes = set() if holder is None else {node.name for node in fleet_view.nodes} - {holder.name}
    target = route(fleet_view, model, avoid=other_nodes) or route(fleet_view, model)
    if target is None:
        raise _not_loaded(model)
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
        message = f"node '{target.node}' did not respond; try again"
        raise ApiError(502, "upstream_connection_error", message, type="api_error")
    status, content = node_response
    if status >= 400:
        node_error = read_error(status, content)
        # The node has unloaded the model since the last poll. Only generation requests load it again.
        if says_model_is_gone(node_error):
            gateway.fleet.lost(target.node, target.model)
            raise _not_loaded(target.model)
        if (error := for_client(node_error, target.node)) is not node_error:
            raise error
    return Response(content, status, media_type="application/json")


def _not_loaded(model: str) -> ApiError:
    return service_unavailable(f"model '{model}' is not loaded; a generation request loads it", RETRY_SECS)


COUNT_TIMEOUT_SECS = 5.0
_REJECTED_PROMPT = (400, 413, 422)  # the node would also reject a generation request with this prompt


async def count_message_tokens(request: Request) -> Response:
    """Respond with the token count of a prompt, or an error in Anthropic's format."""
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
    fleet_view, model, model_known = await find_model(gateway, count.model)
    authorize(principal, model, count.model)
    if not model_known:
        if any(node.healthy for node in fleet_view.nodes):
            raise unknown_model(fleet_view, count.model)
        raise service_unavailable(
            f"no node is up that could serve model '{count.model[:200]}'; start one, or try again", RETRY_OPEN
        )
    if principal is not None:
        await gateway.ledger.check_budget(principal)
    target = route(fleet_view, model)

    async def ask(body: bytes) -> tuple[int, bytes] | None:
        if target is None:
            return None
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_SECS):
                response = await gateway.calls.call(target, TOKENIZE_PATH, body)
        except TimeoutError:
            return None  # the count is then estimated, because a coding agent needs at least an approximate count
        if response is not None and target.kind == "neuron" and response[0] in _REJECTED_PROMPT:
            raise read_error(*response)
        return response

    async with gateway.prepared_images(model, count.body) as prepared:
        return await count_tokens(replace(count, body=prepared.body), model, ask)


# Posts a body to `TOKENIZE_PATH` of a node. Returns status and body of the response, or None if the call failed.
Ask = Callable[[bytes], Awaitable[tuple[int, bytes] | None]]


async def count_tokens(request: CountRequest, model: str, ask: Ask) -> bytes:
    """Return the response body with the prompt's token count.

    Args:
        ask: function that posts a body to a node, and returns status and body of the response, or None if the call
            failed. If it failed or the response has no count, the count is estimated.
    """
    completion = await ask(request.body_for(model))
    count = None if completion is None else parse_count(*completion)
    return orjson.dumps({"input_tokens": request.estimate if count is None else count})
