"""Validates the heads of requests (request line and headers), and builds error responses."""

import http
import random
import re

import httptools
import orjson

from helexa.core.errors import ApiError, unsupported_media_type

Headers = list[tuple[bytes, bytes]]
"""Headers of a request or response: names in lower case, and values."""

_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}
STATUS_LINES = {status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(200, 600)}

_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_ABSOLUTE_FORM = re.compile(rb"https?://([^/?#@]+)(?=[/?#]|$)", re.IGNORECASE)
_FRAMING_HEADERS = frozenset({b"host", b"content-length", b"expect", b"transfer-encoding"})


def request_id(headers: Headers) -> str:
    """Return the value of the header `x-request-id` if it is valid, else a new random id."""
    for name, value in headers:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return value.decode()
    return f"{random.getrandbits(128):032x}"  # must be unique, not secret


def require_json(headers: Headers) -> None:
    """Reject a request whose body is not JSON according to its headers, or is compressed.

    The content type must be JSON, to block requests from web pages of other sites. Before a browser sends JSON for such
    a page, it asks the server for permission (CORS preflight). For some other content types, and for a body without a
    content type, it does not ask. A compressed body is rejected because its decompressed size is not known in advance.

    Raises:
        ApiError: status 415, if the request has no JSON `content-type`, or a `content-encoding` other than `identity`.
    """
    content_types = [value for name, value in headers if name == b"content-type"]
    if not content_types or not all(map(_is_json, content_types)):
        raise unsupported_media_type(b", ".join(content_types)[:200].decode("latin-1"))
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ApiError(415, "unsupported_content_encoding", "send the request body without a content-encoding")


def _is_json(content_type: bytes) -> bool:
    media_type = content_type.partition(b";")[0].strip().lower()
    return media_type == b"application/json" or media_type.endswith(b"+json")


Framing = tuple[int | None, bool]
"""Length of a request body (None if chunked), and True if the client waits for `100 Continue` before the body."""


def framing(version: str, method: bytes, headers: Headers) -> Framing:
    """Return the length of the request body, and whether the client waits for `100 Continue`.

    Also check the HTTP version, the method, and the headers `Host` and `transfer-encoding`.

    Raises:
        ApiError: status 400, if one of these checks fails.
    """
    if (version != "1.1" and version != "1.0") or method == b"CONNECT":
        raise malformed("only HTTP/1.1 and HTTP/1.0 are supported, and CONNECT is not")
    hosts, expects_continue = 0, False
    length: int | None = 0
    for name, value in headers:
        if name not in _FRAMING_HEADERS:
            continue
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            length = int(value)  # the parser rejects invalid and repeated values
        elif name == b"expect":
            expects_continue = value.lower() == b"100-continue"
        elif value.strip().lower() != b"chunked" or version == "1.0":
            raise malformed("the only supported transfer-encoding is chunked, with HTTP/1.1")
        else:
            length = None
    if hosts > 1 or (not hosts and version == "1.1"):
        raise malformed("the request must have exactly one Host header")
    return length, expects_continue and version == "1.1"


Target = tuple[bytes, bytes, bytes | None]
"""Path, query, and authority (host and port) of a request target.

The authority is None if the target is only a path.
"""


def target(url: bytes) -> Target:
    """Split the target of a request line into path, query, and host with port.

    If the target is an absolute URL, the caller must replace the `Host` header by its host and port (RFC 9112, section
    3.2.2).

    Raises:
        ApiError: status 400, if the target is an absolute URL that has no host, contains credentials, or is not an
            http or https URL.
        httptools.HttpParserInvalidURLError: the target cannot be parsed.
    """
    if url.startswith(b"/") and b"#" not in url:
        path, _, query = url.partition(b"?")
        return path, query, None
    parsed = httptools.parse_url(url)
    absolute_form = _ABSOLUTE_FORM.match(url)
    if absolute_form is None and parsed.schema is not None:
        raise malformed("the request target must be a path or an http URL without credentials")
    return parsed.path or b"/", parsed.query or b"", absolute_form and absolute_form[1]


def malformed(message: str) -> ApiError:
    """Return an error with status 400 for a request that is not valid HTTP."""
    return ApiError(400, "malformed_http", message)


def error_response(error: ApiError) -> bytes:
    """Return a complete HTTP response for `error`, which tells the client that the connection will be closed."""
    body = orjson.dumps(error.envelope())
    error_headers = "".join(f"{name.lower()}: {value}\r\n" for name, value in error.headers().items()).encode()
    body_headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return STATUS_LINES[error.status] + error_headers + body_headers + body
