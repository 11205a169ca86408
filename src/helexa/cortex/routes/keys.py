"""`/api/keys`: the admin API of keys.

The admin API requires an admin's key even if `require_auth` is false.
"""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError, invalid_body
from helexa.cortex.access.key import Key
from helexa.cortex.access.key_terms import KeyChange, NewKey, key_json, reject_static
from helexa.cortex.gateway import Gateway
from helexa.cortex.requests.request import read_body
from helexa.cortex.routes.access import Endpoint, admin
from helexa.http.connections.client_disconnect import ClientDisconnected
from helexa.http.connections.request_head import reject_encoded
from helexa.http.json_response import JsonResponse

_MAX_BODY_BYTES = 256 << 10


async def list_keys(request: Request) -> Response:
    """Respond with all keys and their spent tokens, without their secrets. Keys from cortex.toml come first."""
    gateway = _gateway(request)
    entries = [await _entry(gateway, key, "config") for key in gateway.authenticator.static]
    entries += [await _entry(gateway, key) for key in await gateway.keyring.store.list()]
    return JsonResponse({"keys": entries})


async def create_key(request: Request) -> Response:
    """Create a key, and respond with it. Only this response contains the key's secret."""
    gateway = _gateway(request)
    new_key = NewKey.parse(await _body(request))
    if new_key.expires_at is not None and new_key.expires_at <= time.time():
        raise invalid_body("expires_at: must be in the future", "expires_at")
    principal = new_key.principal(gateway.catalogue)
    reject_static(gateway.authenticator.static, principal.key_id)
    key, secret = await gateway.keyring.store.create(principal)
    await gateway.keyring.refresh()
    response = JsonResponse(await _entry(gateway, key) | {"key": secret.get_secret_value()}, 201)
    response.headers["cache-control"] = "no-store"
    return response


async def change_key(request: Request) -> Response:
    """Change the terms of a key, such as its limits, and respond with the key.

    The new terms apply from the next request on.
    """
    gateway, key_id = _gateway(request), request.path_params["key_id"]
    key_change = KeyChange.parse(await _body(request))
    reject_static(gateway.authenticator.static, key_id)
    key = await gateway.keyring.store.change(
        key_id, lambda principal: key_change.apply_to(principal, gateway.catalogue)
    )
    await gateway.keyring.refresh()
    return JsonResponse(await _entry(gateway, key))


async def revoke_key(request: Request) -> Response:
    """Revoke a key, and respond with it. Running requests of the key continue."""
    gateway, key_id = _gateway(request), request.path_params["key_id"]
    reject_static(gateway.authenticator.static, key_id)
    key = await gateway.keyring.store.revoke(key_id)
    await gateway.keyring.refresh()
    return JsonResponse(await _entry(gateway, key))


def _route(path: str, **endpoints: Endpoint) -> Route:
    """Return one route for a path. `endpoints` maps each HTTP method to its endpoint.

    With one route for all methods, a 405 response lists all of them.
    """

    async def dispatch(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, dispatch, methods=list(endpoints))


key_routes = [
    _route("/api/keys", GET=admin(list_keys), POST=admin(create_key)),
    _route("/api/keys/{key_id}", PATCH=admin(change_key), DELETE=admin(revoke_key)),
]


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


async def _entry(gateway: Gateway, key: Key, source: str = "database") -> dict[str, Any]:
    budget = await gateway.ledger.budget(key.principal)
    budget_state = {"spent": budget.spent, "held": budget.held, "window_ends_at": budget.ends_at}
    return key_json(key, source) | budget_state


async def _body(request: Request) -> bytes:
    reject_encoded(request.scope["headers"])
    try:
        return await read_body(request.receive, request.scope["headers"], _MAX_BODY_BYTES)
    except ClientDisconnected:
        raise ApiError(400, "client_disconnected", "the client disconnected while sending its request") from None
