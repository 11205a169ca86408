"""Determine the principal of a request (the account and API key it is billed to) from headers that a gateway sets."""

from hashlib import blake2b

from starlette.requests import Request

_ACCOUNT = "x-helexa-account-id"
_KEY = "x-helexa-key-id"


def principal_of(request: Request) -> str:
    """Return the name of the request's principal: a hash of the account id and key id that the gateway sends.

    The result is empty if the request lacks these headers. Each principal gets a fair share of the engine, and by
    default its own prefix cache. A gateway removes these headers from its clients' requests and sets them itself.

    The node trusts the headers. A client that connects directly to a node can name any principal, use that principal's
    share of the engine, and guess its prompts by measuring response times. Only gateways should reach a node's port.
    """
    account, key = request.headers.get(_ACCOUNT), request.headers.get(_KEY)
    if not account or not key:
        return ""
    return blake2b(f"{account}\0{key}".encode(), digest_size=16).hexdigest()
