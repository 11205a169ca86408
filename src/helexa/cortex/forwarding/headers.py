"""Headers that go to nodes, and headers that go back to clients."""

from functools import lru_cache

from helexa.http.headers import Headers

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_CREDENTIALS = {b"authorization", b"x-api-key", b"cookie"}
# `accept-encoding` is dropped, so that nodes do not compress responses, because the gateway reads their token counts.
_REPLACED = {b"host", b"content-type", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}
# Nodes reject requests with these headers from web pages of other origins, even if the gateway allows the origin.
_BROWSER = {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"sec-fetch-user"}
_NOT_FORWARDED = _HOP_BY_HOP | _CREDENTIALS | _REPLACED | _BROWSER
_IDENTITY_PREFIX = b"x-helexa-"
# CORS headers of nodes are dropped: only the gateway's setting `cors_origins` decides which web pages may read a
# response.
_CORS = {
    b"access-control-allow-origin",
    b"access-control-allow-credentials",
    b"access-control-expose-headers",
}
_NOT_RETURNED = _HOP_BY_HOP | _CORS | {b"date", b"server", b"x-request-id", b"x-helexa-route", b"x-helexa-advice"}

# Header that makes nginx forward events at once; by default, nginx buffers responses.
UNBUFFERED = (b"x-accel-buffering", b"no")


def forwarded_headers(headers: Headers) -> Headers:
    """Return the headers of a client's request that are forwarded to nodes.

    All header names must be in lower case.
    """
    # Credentials, hop-by-hop headers, headers of browsers such as `origin`, and headers that the gateway sets itself
    # are not forwarded. Headers with the prefix `x-helexa-` are not forwarded either, because nodes trust them.
    connection_headers = _headers_in_connection(headers)
    excluded = _NOT_FORWARDED | connection_headers if connection_headers else _NOT_FORWARDED
    return [
        (name, value)
        for name, value in headers
        if name not in excluded
        and not name.startswith(_IDENTITY_PREFIX)
        and not (b"\r" in value or b"\n" in value or b"\0" in value)
    ]


def returned_headers(headers: Headers) -> Headers:
    """Return the headers of a node's response that go to the client.

    Hop-by-hop headers, CORS headers and headers that the gateway sets itself are not returned.
    """
    connection_headers = _headers_in_connection(headers)
    excluded = _NOT_RETURNED | connection_headers if connection_headers else _NOT_RETURNED
    return [(name, value) for name, value in headers if name not in excluded]


def _headers_in_connection(headers: Headers) -> set[bytes]:
    if b"connection" not in dict(headers):
        return set()
    values = [value for name, value in headers if name == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")}


_ADVICE = {
    b"litellm": "retry 429 and 503 after Retry-After; context_length_exceeded is final until messages are shorter",
    b"agent-zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"agent zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"zed": "limits are in /v1/models as max_model_len and max_output_tokens",
}


def advice(headers: Headers) -> bytes | None:
    """Return the advice in `_ADVICE` for the client that sent `headers`, else None."""
    for header, value in headers:
        if header == b"user-agent":
            return _advice_for(value)
    return None


@lru_cache(maxsize=64)
def _advice_for(user_agent: bytes) -> bytes | None:
    lower_case = user_agent.lower()
    return next((text.encode() for name, text in _ADVICE.items() if name in lower_case), None)
