"""Checks of the `Host` and `Origin` headers, to detect requests from web pages of other sites.

A browser lets any web page send requests to any address, including this machine's, and states the page's origin in
`Origin`. With DNS rebinding, the page's own domain name resolves to this machine. The page then has the same origin as
the server, but `Host` contains its domain name.
"""

import ipaddress

from helexa.http.connections.request_head import Headers


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` is reachable from this machine only."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"  # any other name may resolve to any address
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def host_and_origin(headers: Headers) -> tuple[bytes, bytes]:
    """Return the values of `Host` and `Origin` in lower case, empty if absent."""
    host = origin = b""
    for name, value in headers:
        if name == b"host":
            host = value.lower()
        elif name == b"origin":
            origin = value.lower()
    return host, origin


def without_port(host: bytes) -> bytes:
    """Return the name or address in a `Host` header; an IPv6 address keeps its brackets."""
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Return whether a page's origin is the server that `Host` names, with or without TLS in front of the server."""
    scheme, _, authority = origin.partition(b"://")
    return scheme in (b"http", b"https") and authority == host
