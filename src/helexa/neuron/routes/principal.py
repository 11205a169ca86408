"""The principal of a request, from headers that a gateway sets."""

from hashlib import blake2b

from starlette.requests import Request

_ACCOUNT = "x-helexa-account-id"
_KEY = "x-helexa-key-id"


def principal_of(request: Request) -> str:
    """Return the principal as one short word; empty without the headers. It selects fair share and cached prompts.

    A gateway drops these headers from clients' requests and sets them itself. Clients of a gateway therefore share
    cached prompts only with themselves. A node trusts the headers: a client with direct access to a node can name any
    principal, use its fair share and, by response times, test guesses of its prompts. Only gateways should reach a
    node's port.
    """
    account, key = request.headers.get(_ACCOUNT), request.headers.get(_KEY)
    if not account or not key:
        return ""
    return blake2b(f"{account}\0{key}".encode(), digest_size=16).hexdigest()
