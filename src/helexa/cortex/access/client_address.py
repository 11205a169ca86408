"""The IP address of a request's client, also behind trusted reverse proxies."""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from starlette.types import Scope

from helexa.http.connections.request_head import Headers

Network = IPv4Network | IPv6Network


class TrustedProxies:
    """Reads the header `X-Forwarded-For` of requests from trusted proxies.

    Each proxy appends the address of its own client to the header. Any client can send the header, so only the
    addresses that trusted proxies appended are true: the client is the last address that is not a trusted proxy.

    Args:
        networks: addresses of the trusted proxies.
    """

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)
        self.trusts = lru_cache(maxsize=1024)(self._trusts) if networks else lambda _: False
        """Whether an IP address, given as text, is the address of a trusted proxy."""

    def client(self, scope: Scope) -> str:
        """Return the IP address of the client of a request. Empty if it is unknown."""
        address: str = scope["client"][0] if scope.get("client") else ""
        if not self.trusts(address):
            return address
        for text in reversed(_forwarded(scope["headers"])):
            forwarded = _parsed(text)
            if forwarded is None:
                return address
            address = str(forwarded)
            if not self.trusts(address):
                return address
        return address

    def _trusts(self, text: str) -> bool:
        address = _parsed(text)
        return address is not None and any(address in network for network in self._networks)


def _forwarded(headers: Headers) -> list[str]:
    return [
        part for name, value in headers if name == b"x-forwarded-for" for part in value.decode("latin-1").split(",")
    ]


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address in one entry of the header, which may have a port, or None if the entry is not an address."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
