"""`/api/keys`: the admin API of keys. Nobody is anonymous here, whatever `require_auth` says."""

import time

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError, invalid_body
from helexa.cortex.head import refuse_encoded
from helexa.cortex.key_terms import KeyChange, NewKey, described, refuse_static
from helexa.cortex.ledger.keys import Keyring
from helexa.cortex.question import ClientGone, read_body

_MAX_BODY_BYTES = 256 << 10


async def list_keys(request: Request) -> Response:
    """All keys without their secrets; those that stand in cortex.toml first."""
    keyring = _admitted(request)
    static, stored = keyring.gatekeeper.static, await keyring.store.list()
    return _json({"keys": [*(described(key, "config") for key in static), *(described(key) for key in stored)]})


async def create_key(request: Request) -> Response:
    """A new key. This answer is the only one that ever holds its secret."""
    keyring = _admitted(request)
    terms = NewKey.parse(await _body(request))
    if terms.expires_at is not None and terms.expires_at <= time.time():
        raise invalid_body("expires_at: this is in the past", "expires_at")
    wanted = terms.principal(_catalogue(request))
    refuse_static(keyring.gatekeeper.static, wanted.key_id)
    key, secret = await keyring.store.create(wanted)
    await keyring.refresh()
    answer = _json(described(key) | {"key": secret.get_secret_value()}, 201)
    answer.headers["cache-control"] = "no-store"
    return answer


async def change_key(request: Request) -> Response:
    """Other terms for a key, from its next request on."""
    keyring = _admitted(request)
    terms, catalogue = KeyChange.parse(await _body(request)), _catalogue(request)
    refuse_static(keyring.gatekeeper.static, key_id := request.path_params["key_id"])
    key = await keyring.store.change(key_id, lambda principal: terms.applied(principal, catalogue))
    await keyring.refresh()
    return _json(described(key))


async def revoke_key(request: Request) -> Response:
    """The end of a key. Requests that run already are finished."""
    keyring = _admitted(request)
    refuse_static(keyring.gatekeeper.static, key_id := request.path_params["key_id"])
    key = await keyring.store.revoke(key_id)
    await keyring.refresh()
    return _json(described(key))


key_routes = [
    Route("/api/keys", list_keys, methods=["GET"]),
    Route("/api/keys", create_key, methods=["POST"]),
    Route("/api/keys/{key_id}", change_key, methods=["PATCH"]),
    Route("/api/keys/{key_id}", revoke_key, methods=["DELETE"]),
]


def _admitted(request: Request) -> Keyring:
    """The keyring, for an admin alone."""
    keyring: Keyring = request.app.state.gateway.keyring
    keyring.gatekeeper.admit_admin(request.scope["headers"])
    return keyring


def _catalogue(request: Request) -> Catalogue:
    return request.app.state.gateway.catalogue


async def _body(request: Request) -> bytes:
    refuse_encoded(request.scope["headers"])
    try:
        return await read_body(request.receive, request.scope["headers"], _MAX_BODY_BYTES)
    except ClientGone:
        raise ApiError(400, "client_disconnected", "the client went away while sending its request") from None


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
