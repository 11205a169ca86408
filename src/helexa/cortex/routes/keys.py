"""`/api/keys`: the API of keys.

Changes require an admin's key even if `require_auth` is false. Users may list the keys of their account.
"""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import invalid_body
from helexa.cortex.access.key import Key
from helexa.cortex.access.key_terms import KeyChange, NewKey, key_json, reject_static
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.statement import Budget
from helexa.cortex.requests.request import read_json_body
from helexa.cortex.routes.access import admin, holder, method_route, visible_account
from helexa.http.json_response import JsonResponse


async def list_keys(request: Request) -> Response:
    """Respond with the keys and their spent tokens, without their secrets. Keys from cortex.toml come first.

    An admin gets all keys, and a user gets the keys of the user's account.
    """
    gateway, account = _gateway(request), visible_account(request)
    keys = [(key, "config") for key in gateway.authenticator.static]
    keys += [(key, "database") for key in await gateway.keyring.store.list()]
    visible = [(key, source) for key, source in keys if account in (None, key.principal.account_id)]
    budgets = await gateway.ledger.budgets(key.principal for key, _ in visible)
    return JsonResponse({"keys": [_json(key, source, budgets[key.principal.key_id]) for key, source in visible]})


async def create_key(request: Request) -> Response:
    """Create a key, and respond with it. Only this response contains the key's secret."""
    gateway = _gateway(request)
    new_key = NewKey.parse(await read_json_body(request.receive, request.scope["headers"]))
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
    key_change = KeyChange.parse(await read_json_body(request.receive, request.scope["headers"]))
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


key_routes = [
    method_route("/api/keys", GET=holder(list_keys), POST=admin(create_key)),
    method_route("/api/keys/{key_id}", PATCH=admin(change_key), DELETE=admin(revoke_key)),
]


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


async def _entry(gateway: Gateway, key: Key) -> dict[str, Any]:
    return _json(key, "database", await gateway.ledger.budget(key.principal))


def _json(key: Key, source: str, budget: Budget) -> dict[str, Any]:
    budget_state = {"spent": budget.spent, "held": budget.held, "window_ends_at": budget.ends_at}
    return key_json(key, source) | budget_state
