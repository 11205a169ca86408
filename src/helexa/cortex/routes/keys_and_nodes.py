"""Administration of keys and nodes: `/api/keys`, `/api/nodes`, `/api/join`.

Changes require an admin's key even if `require_auth` is false. Users may list the keys of their account.
"""

import asyncio
import time
from contextlib import suppress
from ipaddress import ip_network
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError, invalid_body
from helexa.cortex.access.keys import Key, KeyChange, NewKey, key_json, reject_static
from helexa.cortex.access.proxies_exposure_and_cors import is_forwarded
from helexa.cortex.api.admin_requests import NewInvitation, NodeJoin
from helexa.cortex.api.listings import node_entries
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.forwarding.request_body_limit_and_workers import read_json_body
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.reservations_in_memory import Budget
from helexa.cortex.routes.access_and_errors import admin, holder, method_route, visible_account
from helexa.http.responses import JsonResponse

MAX_WAIT_SECS = 600.0


async def list_keys(request: Request) -> Response:
    """`GET /api/keys`: list keys with spent tokens, the keys of cortex.toml first.

    An admin gets all keys, and a user gets the keys of the user's account.
    """
    gateway, account = _gateway(request), visible_account(request)
    keys = [(key, "config") for key in gateway.authenticator.static]
    keys += [(key, "database") for key in await gateway.key_store.list()]
    visible = [(key, source) for key, source in keys if account in (None, key.principal.account_id)]
    budgets = await gateway.ledger.budgets(key.principal for key, _ in visible)
    return JsonResponse({"keys": [_json(key, source, budgets[key.principal.key_id]) for key, source in visible]})


async def create_key(request: Request) -> Response:
    """`POST /api/keys`: create a key; only this response contains its secret."""
    gateway = _gateway(request)
    new_key = NewKey.parse(await read_json_body(request.receive, request.scope["headers"]))
    if new_key.expires_at is not None and new_key.expires_at <= time.time():
        raise invalid_body("expires_at: must be in the future", "expires_at")
    principal = new_key.principal(gateway.catalog)
    reject_static(gateway.authenticator.static, principal.key_id)
    key, secret = await gateway.key_store.create(principal)
    # Without this call, this gateway would reject the new key until its next periodic refresh.
    await gateway.key_store.refresh()
    response = JsonResponse(await _entry(gateway, key) | {"key": secret.get_secret_value()}, 201)
    response.headers["cache-control"] = "no-store"
    return response


async def change_key(request: Request) -> Response:
    """`PATCH /api/keys/...`: change a key's limits from the next request on."""
    gateway, key_id = _gateway(request), request.path_params["key_id"]
    key_change = KeyChange.parse(await read_json_body(request.receive, request.scope["headers"]))
    reject_static(gateway.authenticator.static, key_id)
    key = await gateway.key_store.change(key_id, lambda principal: key_change.apply_to(principal, gateway.catalog))
    await gateway.key_store.refresh()
    return JsonResponse(await _entry(gateway, key))


async def revoke_key(request: Request) -> Response:
    """`DELETE /api/keys/...`: revoke a key; its running requests continue."""
    gateway, key_id = _gateway(request), request.path_params["key_id"]
    # A key in cortex.toml would be valid again after the next start, so it must be removed from the file instead.
    reject_static(gateway.authenticator.static, key_id)
    key = await gateway.key_store.revoke(key_id)
    await gateway.key_store.refresh()
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


async def list_nodes(request: Request) -> Response:
    """`GET /api/nodes`: respond with the state of every node."""
    gateway: Gateway = request.app.state.gateway
    return JsonResponse({"nodes": list(node_entries(gateway.fleet.view(), gateway.lifecycle.loads()).values())})


async def cordon_node(request: Request) -> Response:
    """`POST /api/nodes/.../cordon`: send no more requests and loads to a node."""
    return _cordon(request, True)


async def uncordon_node(request: Request) -> Response:
    """`POST /api/nodes/.../uncordon`: send requests and loads to a node again."""
    return _cordon(request, False)


async def drain_node(request: Request) -> Response:
    """`POST /api/nodes/.../drain`: cordon a node, and wait until its requests end.

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
    return ApiError(
        404, "node_not_found", f"node '{name[:200]}' not found; GET /api/nodes lists the nodes", param="name"
    )


def read_wait_secs(request: Request) -> float:
    """Return the query parameter `wait_secs`, or `MAX_WAIT_SECS` if it is absent.

    Raises:
        ApiError: 400 if the value is not an integer from 0 to `MAX_WAIT_SECS`.
    """
    text = request.query_params.get("wait_secs")
    if text is None:
        return MAX_WAIT_SECS
    # Cut the text before `int`, which raises an exception for more than 4300 digits.
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


async def create_invitation(request: Request) -> Response:
    """`POST /api/invitations`: create an invitation. Only this response has its token."""
    gateway: Gateway = request.app.state.gateway
    body = await NewInvitation.read(request)
    networks = [ip_network(text) for text in body.networks]
    invitation, token = await gateway.node_store.invite(body.expires_secs, body.name, networks)
    content: dict[str, Any] = {
        "token": token.get_secret_value(),
        "name": invitation.node,
        "networks": [str(network) for network in networks],
        "expires_at": invitation.expires_at,
    }
    response = JsonResponse(content, 201)
    response.headers["cache-control"] = "no-store"
    return response


async def join_node(request: Request) -> Response:
    """`POST /api/join`: add the node that sent the request, if its token is valid."""
    gateway: Gateway = request.app.state.gateway
    body = await NodeJoin.read(request)
    peer = request.client.host if request.client is not None else ""
    # The client's address decides which address the node may have. An untrusted proxy would hide the client's address.
    if is_forwarded(request.scope["headers"]) and not gateway.proxies.trusts(peer):
        message = f"the request came through {peer}, which is not in gateway.trusted_proxies; add it there"
        raise ApiError(400, "untrusted_proxy", message)
    client = gateway.proxies.client(request.scope)
    endpoint = await gateway.joins.join(body.token, body.name, body.url, body.key, client)
    return JsonResponse({"name": body.name, "endpoint": endpoint}, 201)


async def remove_node(request: Request) -> Response:
    """`DELETE /api/nodes/...`: remove a joined node; its running requests continue."""
    gateway: Gateway = request.app.state.gateway
    name = request.path_params["name"]
    if not await gateway.node_store.remove(name):
        if any(neuron.name == name for neuron in gateway.config.neurons):
            message = f"node '{name[:200]}' is defined in cortex.toml; remove it there"
            raise ApiError(409, "static_node", message, param="name")
        raise node_not_found(name)
    await gateway.node_store.refresh()
    return JsonResponse({"name": name, "removed": True})
