"""Who a request is for: the identity that a gateway has checked and put on it."""

from hashlib import blake2b

from starlette.requests import Request

_ACCOUNT = "x-helexa-account-id"
_KEY = "x-helexa-key-id"


def principal_of(request: Request) -> str:
    """The principal as one short word, empty without one: whose turn it is, and whose pages in the KV cache these are.

    A gateway drops these headers when clients send them and writes them itself, so whoever comes through it finds only
    his own prompts cached. A node believes them: whoever reaches it directly can name any principal and, by what is
    answered quickly, test guesses of that principal's prompts, or take its turns. So a node's port is for its gateway
    alone.
    """
    account, key = request.headers.get(_ACCOUNT), request.headers.get(_KEY)
    if not account or not key:
        return ""
    return blake2b(f"{account}\0{key}".encode(), digest_size=16).hexdigest()
