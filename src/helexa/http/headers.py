"""Headers of requests: request ids, content types, hosts and origins.

A browser lets every web page send requests to any address, including addresses of this machine. The header `Origin`
names the page's site, so a comparison with `Host` detects such requests. DNS rebinding defeats this comparison: an
attacker's domain name resolves to this machine, and both headers contain that name. A check of the name in `Host`
detects DNS rebinding.
"""

import random
import re

from helexa.core.errors import ApiError, unsupported_media_type
from helexa.http.content_coding import ACCEPTED

Headers = list[tuple[bytes, bytes]]  # headers of a request or response: names in lower case, and values

_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_RESERVED_SUFFIXES = (b".localhost", b".internal")


def request_id(headers: Headers) -> str:
    """Return the header `x-request-id` if it is valid, else a new random id."""
    for name, value in headers if b"x-request-id" in dict(headers) else ():
        if name == b"x-request-id" and _ID.fullmatch(value):
            return value.decode()
    return f"{random.getrandbits(128):032x}"  # must be unique, not secret


def require_json(headers: Headers) -> None:
    """Raise ApiError 415 unless the headers announce JSON, without an encoding."""
    content_types = [value for name, value in headers if name == b"content-type"]
    # A body without a content type is rejected, too. For any web page, a browser sends such a body, a form or plain
    # text without asking the server first (CORS preflight). A browser sends JSON only after the server has agreed.
    if not content_types or not all(map(_is_json, content_types)):
        raise unsupported_media_type(b", ".join(content_types)[:200].decode("latin-1"))
    # `ClientConnection` has already removed the header `content-encoding` if it decodes the body. A header that is left
    # therefore names an unsupported encoding.
    for name, value in headers if b"content-encoding" in dict(headers) else ():
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            shown = value[:100].decode("latin-1")
            message = f"the content-encoding {shown!r} is not supported; use one of {ACCEPTED}, or none"
            raise ApiError(415, "unsupported_content_encoding", message, accept_encoding=ACCEPTED)


def _is_json(content_type: bytes) -> bool:
    media_type = content_type.partition(b";")[0].strip().lower()
    return media_type == b"application/json" or media_type.endswith(b"+json")


def host_and_origin(headers: Headers) -> tuple[bytes, bytes]:
    """Return the headers `Host` and `Origin` in lower case. A missing header is empty."""
    values = dict(headers)
    return values.get(b"host", b"").lower(), values.get(b"origin", b"").lower()


def without_port(host: bytes) -> bytes:
    """Return a `Host` header without its port, but with the brackets of IPv6."""
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host


def is_reserved_name(name: bytes) -> bool:
    """Return whether a host name is reserved, so that no public web site can have it.

    The name, in lower case and without a port, ends in `.localhost` or `.internal`, as in `host.docker.internal`.
    """
    return name.endswith(_RESERVED_SUFFIXES)


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Return whether the header `Origin` names the host and port of the header `Host`."""
    scheme, _, authority = origin.partition(b"://")
    return scheme in (b"http", b"https") and authority == host  # schemes may differ: a reverse proxy may terminate TLS
