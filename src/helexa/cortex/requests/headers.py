"""Header filters between clients and nodes."""

from helexa.http.connections.request_head import Headers

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
# `accept-encoding` is dropped so that nodes answer without compression, which the meter cannot read.
_REPLACED = {b"host", b"content-type", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}
# The gateway has already checked the browser's origin; nodes reject requests from foreign pages.
_BROWSER = {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"sec-fetch-user"}
_NOT_FORWARDED = _HOP_BY_HOP | _CREDENTIALS | _REPLACED | _BROWSER
_IDENTITY_PREFIX = b"x-helexa-"
# The gateway's `cors_origins` decides which pages may read a response, not its nodes.
_CORS = {
    b"access-control-allow-origin",
    b"access-control-allow-credentials",
    b"access-control-expose-headers",
}
_NOT_RETURNED = _HOP_BY_HOP | _CORS | {b"date", b"server", b"x-request-id", b"x-helexa-route", b"x-helexa-advice"}


UNBUFFERED = (b"x-accel-buffering", b"no")
"""Makes nginx, which buffers responses by default, pass events on at once."""


def bearer_header(key: str | None) -> Headers:
    """Return the header with a node's key, or no header."""
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]


def forwarded_headers(headers: Headers) -> Headers:
    """Return the headers of a client's request that nodes may see; names are in lower case.

    Dropped are credentials, identity headers, headers of the connection or the browser, and headers that the gateway
    sets itself: each body that the gateway sends is JSON.
    """
    connection_named = _named_by_connection(headers)
    excluded = _NOT_FORWARDED | connection_named if connection_named else _NOT_FORWARDED
    return [
        (name, value)
        for name, value in headers
        if name not in excluded
        and not name.startswith(_IDENTITY_PREFIX)
        and not (b"\r" in value or b"\n" in value or b"\0" in value)
    ]


def returned_headers(headers: Headers) -> Headers:
    """Return a node's headers that the client may see, names in lower case: all except headers of the connection."""
    connection_named = _named_by_connection(headers)
    excluded = _NOT_RETURNED | connection_named if connection_named else _NOT_RETURNED
    return [(name, value) for name, value in headers if name not in excluded]


def _named_by_connection(headers: Headers) -> set[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")} if values else set()
