"""Read the bodies of JSON requests, with limits on size and time."""

from hashlib import blake2b

from starlette.requests import ClientDisconnect, Request

from helexa.core.errors import ApiError
from helexa.http.headers import require_json

MAX_BODY_BYTES = 64 << 20

_ACCOUNT = "x-helexa-account-id"
_KEY = "x-helexa-key-id"
_INCLUDE_USAGE, _PROMPT = "x-helexa-include-usage", "prompt"


async def read_json(request: Request) -> bytes:
    """Return the unparsed body after checks of content type and size.

    Raises:
        ApiError: status 415: the content type is not JSON, or the body is compressed. 413: the body is larger than
            `MAX_BODY_BYTES`. 408: the client stopped sending the body. 400: the client disconnected.
    """
    require_json(request.scope["headers"])
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
        return bytes(body)
    except TimeoutError:
        raise ApiError(408, "request_timeout", "the client stopped sending the request body") from None
    except ClientDisconnect:
        raise ApiError(400, "client_disconnected", "the client disconnected during the request") from None


def _too_large() -> ApiError:
    return ApiError(
        413, "request_too_large", f"the request body is over the limit of {MAX_BODY_BYTES >> 20} MiB; send less"
    )


def principal_of(request: Request) -> str:
    """Return the principal's name: a hash of the gateway's account and key.

    The result is empty if the request lacks these headers. Each principal gets a fair share of the engine, and by
    default its own prefix cache.
    """
    # The node trusts the headers, which a gateway removes from its clients' requests. A client that connects directly
    # can name any principal, use its share, and guess its prompts by response times: only gateways should reach a node.
    account, key = request.headers.get(_ACCOUNT), request.headers.get(_KEY)
    if not account or not key:
        return ""
    return blake2b(f"{account}\0{key}".encode(), digest_size=16).hexdigest()


def reports_usage(request: Request) -> bool:
    """Return whether a gateway requests a last chunk with token counts."""
    # Gateways send the header even if the client requests no usage, and then remove the chunk from the stream.
    return request.headers.get(_INCLUDE_USAGE) in ("1", _PROMPT)


def counts_prompt(request: Request) -> bool:
    """Return whether a gateway requests a chunk with the prompt's counts."""
    # In Anthropic's Messages API, the first event of a stream contains these counts.
    return request.headers.get(_INCLUDE_USAGE) == _PROMPT
