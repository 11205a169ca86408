"""Determine the principal of a request from headers that a gateway sets."""

from hashlib import blake2b

from starlette.requests import Request

_ACCOUNT = "x-helexa-account-id"
_KEY = "x-helexa-key-id"


def principal_of(request: Request) -> str:
    """Return the request's principal as one short word; empty if the request lacks the gateway's headers.

    The principal selects the request's fair share of the engine and the cached prompts that the request may reuse. A
    gateway drops these headers from its clients' requests and sets its own, so different clients of a gateway do not
    share cached prompts.

    A node trusts the headers. A client that connects directly to a node can name any principal, use its fair share and,
    by measuring response times, guess its prompts. Therefore only gateways should be able to reach a node's port.
    """
    account, key = request.headers.get(_ACCOUNT), request.headers.get(_KEY)
    if not account or not key:
        return ""
    return blake2b(f"{account}\0{key}".encode(), digest_size=16).hexdigest()
