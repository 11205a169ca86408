"""Which headers pass: what a node may see of a client's, and a client of a node's."""

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
# `accept-encoding` is dropped so that nodes answer in plain bytes, which the meter can read.
_REPLACED = {b"host", b"content-type", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}
# The gateway has checked the page that a browser's request comes from; nodes reject requests of foreign pages.
_BROWSER = {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"sec-fetch-user"}
_NOT_FORWARDED = _HOP_BY_HOP | _CREDENTIALS | _REPLACED | _BROWSER
_IDENTITY_PREFIX = b"x-helexa-"
# Which pages may read an answer is up to the gateway's `cors_origins`, not to its nodes.
_CORS = {
    b"access-control-allow-origin",
    b"access-control-allow-credentials",
    b"access-control-expose-headers",
}
_NOT_RETURNED = _HOP_BY_HOP | _CORS | {b"date", b"server", b"x-request-id", b"x-helexa-route", b"x-helexa-advice"}


UNBUFFERED = (b"x-accel-buffering", b"no")
"""Makes nginx, which buffers responses by default, pass events on at once."""


def bearer_header(key: str | None) -> Headers:
    """Return the header that carries a node's key, if it has one."""
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]


def forwarded_headers(headers: Headers) -> Headers:
    """Return the headers of a client's request that nodes may see; names are in lower case.

    Dropped are credentials, claims of identity, what describes the connection or the browser, and what the gateway sets
    itself: each body that it sends is JSON.
    """
    named = _named_by_connection(headers)
    dropped = _NOT_FORWARDED | named if named else _NOT_FORWARDED
    return [
        (name, value)
        for name, value in headers
        if name not in dropped
        and not name.startswith(_IDENTITY_PREFIX)
        and not (b"\r" in value or b"\n" in value or b"\0" in value)
    ]


def returned_headers(headers: Headers) -> Headers:
    """A node's headers, names in lower case, as the client may see them: all but those of the connection."""
    named = _named_by_connection(headers)
    dropped = _NOT_RETURNED | named if named else _NOT_RETURNED
    return [(name, value) for name, value in headers if name not in dropped]


def _named_by_connection(headers: Headers) -> set[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")} if values else set()
