"""Trusted proxies, exposure to other machines without a key, and CORS headers."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from helexa.core.address import is_loopback
from helexa.core.errors import ConfigError
from helexa.cortex.config import CortexConfig
from helexa.http.headers import Headers, host_and_origin, without_port

Network = IPv4Network | IPv6Network

_PROXY_HEADERS = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
_METHODS = ("GET", "POST", "PATCH", "DELETE")
_EXPOSED = (
    "retry-after",
    "x-request-id",
    "x-helexa-route",
    "x-helexa-advice",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
)


class TrustedProxies:
    """Reads the header `X-Forwarded-For` of requests from trusted proxies.

    Each proxy appends the address of its own client to the header. Any client can send the header, so only the
    addresses that trusted proxies appended are true: the client is the last address that is not a trusted proxy.
    """

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)
        # function that returns whether an IP address, given as text, is the address of a trusted proxy
        self.trusts = lru_cache(maxsize=1024)(self._trusts) if networks else lambda _: False

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


def is_from_this_machine(scope: Scope) -> bool:
    """Return whether a program on this machine sent the request directly.

    The result is False for requests that a reverse proxy on this machine forwards. It is also False for requests to a
    domain name other than `localhost`, because a web page can attack this machine with such a name (DNS rebinding).
    """
    if not (scope.get("client") and scope.get("server")):
        return False
    headers: Headers = scope["headers"]
    client, server = scope["client"][0], scope["server"][0]
    host = without_port(host_and_origin(headers)[0]).decode("latin-1")
    is_address = host == "localhost" or _parsed(host) is not None
    return (is_loopback(client) or client == server) and is_address and not is_forwarded(headers)


def is_forwarded(headers: Headers) -> bool:
    """Return whether a reverse proxy forwarded a request, by its headers."""
    return any(name in _PROXY_HEADERS for name, _ in headers)


def _forwarded(headers: Headers) -> list[str]:
    return [
        part for name, value in headers if name == b"x-forwarded-for" for part in value.decode("latin-1").split(",")
    ]


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address in `text`, which may have brackets and a port; or None."""
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


def check_exposure(config: CortexConfig) -> None:
    """Raise ConfigError if other machines could send requests without a key."""
    if config.entitlements.require_auth or config.gateway.insecure:
        return
    addresses = [config.gateway.listen, *([config.ollama.listen] if config.ollama.listen else [])]
    listen = next((address for address in addresses if not is_loopback(address.host)), None)
    if listen is None:
        return
    raise ConfigError(
        f"{listen} is reachable from other machines, and no key is required: listen on 127.0.0.1; or set "
        "entitlements.require_auth = true and create keys with `cortex keys create`; or, to let all machines of the "
        "network use the gateway, use --insecure or set gateway.insecure = true"
    )


def with_cors(app: ASGIApp, origins: Iterable[str]) -> ASGIApp:
    """Wrap `app` in a middleware that adds CORS headers for web pages of `origins`."""
    # The middleware answers preflight requests itself, so they need no API key. Cookies and the browser's HTTP
    # authentication are never allowed, so pages must send their API key in a header.
    return CORSMiddleware(
        app,
        allow_origins=[origin.rstrip("/") for origin in origins],
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )
