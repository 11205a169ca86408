"""Access checks of a node's requests.

If the node has an `api_key`, every request except `GET /health` and `GET /health/ready` must have this key. A
request without the key gets a 401.

If the node has no `api_key`, it rejects requests that web pages of other sites send through a browser. Such requests
get a 403:

* Requests with an `Origin` header other than the node's own origin. Only browsers send `Origin`.
* If the node listens on a loopback address: requests with an unknown name in the `Host` header.
* If the node listens on a network address: requests that have an unknown name in `Host` and also have an `Origin`.
  Without `Origin`, any name is permitted, because gateways may reach the node by any DNS name. An attacker who uses
  DNS rebinding still cannot change anything, because browsers send `Origin` with every POST and DELETE.
"""

import hmac
import ipaddress
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from helexa.core.errors import ApiError
from helexa.http.connections.request_head import Headers
from helexa.http.origin import host_and_origin, is_loopback, is_same_origin, without_port
from helexa.neuron.config import NeuronConfig
from helexa.neuron.routes.error_response import error_response, log_error_response

_OPEN = ("/health", "/health/ready")
_RESERVED_SUFFIXES = (b".localhost", b".internal")  # reserved domains, which cannot be registered by web sites


class AccessGuard:
    """ASGI middleware that rejects requests without permission with status 401 or 403."""

    def __init__(self, app: ASGIApp, config: NeuronConfig) -> None:
        self._app = app
        self._key = config.api_key.get_secret_value().encode() if config.api_key else None
        self._checks_every_host = is_loopback(config.host)
        names = ("localhost", socket.gethostname(), config.host, *config.allowed_hosts)
        self._names = frozenset(name.lower().encode() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the application, or send an error response if the request is not permitted."""
        error = self._error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            log_error_response(scope["path"], error)
            await error_response(error)(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        if self._key is not None:
            is_open = scope["path"] in _OPEN and scope["method"] in ("GET", "HEAD")
            return None if is_open or hmac.compare_digest(_bearer(scope["headers"]), self._key) else _unauthorized()
        host, origin = host_and_origin(scope["headers"])
        name = without_port(host).removesuffix(b".")
        if (origin or self._checks_every_host) and name and not self._knows(name):
            return _unknown_host(name)
        if origin and not is_same_origin(origin, host):
            return _foreign_origin(origin)
        return None

    def _knows(self, name: bytes) -> bool:
        return name in self._names or name.endswith(_RESERVED_SUFFIXES) or _is_address(name)


def exposure(config: NeuronConfig) -> str | None:
    """Return a warning if other machines can connect to the node and it requires no API key, else None."""
    if config.api_key is not None or is_loopback(config.host):
        return None
    return (
        f"other machines can connect to {config.host or '0.0.0.0'}:{config.port} and run prompts, read the list of "
        "models, and load and unload models without a key; set api_key (and bearer for this node in cortex.toml), or "
        'host = "127.0.0.1"'
    )


def _is_address(name: bytes) -> bool:
    try:
        ipaddress.ip_address(name.decode("ascii").removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _bearer(headers: Headers) -> bytes:
    for name, value in headers:
        scheme, _, secret = value.strip().partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            return secret.strip()
    return b""


def _unauthorized() -> ApiError:
    return ApiError(401, "invalid_api_key", "this node requires its api_key: 'Authorization: Bearer <key>'")


def _unknown_host(name: bytes) -> ApiError:
    shown = name.decode("latin-1")[:200]
    return ApiError(
        403, "host_not_allowed", f"'{shown}' is not a known name of this node; add it to allowed_hosts in neuron.toml"
    )


def _foreign_origin(origin: bytes) -> ApiError:
    shown = origin.decode("latin-1")[:200]
    return ApiError(
        403,
        "origin_not_allowed",
        f"web pages of '{shown}' may not use this node; use a gateway with cors_origins, or set api_key in neuron.toml",
    )
