"""Checks of the `Host` and `Origin` headers, which detect requests that web pages of other sites send.

A browser lets every web page send requests to any address, including addresses of this machine. The header `Origin`
names the page's site, so a comparison with `Host` detects such requests. DNS rebinding defeats this comparison: an
attacker's domain name resolves to this machine, and both headers contain that name. A check of the name in `Host`
detects DNS rebinding.
"""

import ipaddress

from helexa.http.connections.request_head import Headers


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on the address `host` can only be reached from this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"  # any other name may resolve to any address
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def host_and_origin(headers: Headers) -> tuple[bytes, bytes]:
    """Return the values of the headers `Host` and `Origin` in lower case. A missing header is returned as empty."""
    host = origin = b""
    for name, value in headers:
        if name == b"host":
            host = value.lower()
        elif name == b"origin":
            origin = value.lower()
    return host, origin


def without_port(host: bytes) -> bytes:
    """Return the value of a `Host` header without its port. Brackets around an IPv6 address are kept."""
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Return whether `origin` (header `Origin`) has the same host and port as `host` (header `Host`).

    The schemes http and https are both accepted, because a reverse proxy may terminate TLS.
    """
    scheme, _, authority = origin.partition(b"://")
    return scheme in (b"http", b"https") and authority == host
