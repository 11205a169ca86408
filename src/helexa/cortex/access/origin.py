"""Protects a gateway that requires no API keys against requests that foreign web pages send from a user's browser."""

from starlette.types import ASGIApp, Receive, Scope, Send

from helexa.core.errors import ApiError
from helexa.cortex.access.auth import Authenticator
from helexa.cortex.config import GatewaySection
from helexa.cortex.requests.error_response import error_response
from helexa.http.connections.request_head import Headers
from helexa.http.origin import host_and_origin, is_loopback, is_same_origin, without_port

_LOCAL_HOSTS = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})


class OriginGuard:
    """ASGI middleware that rejects requests from foreign web pages if they have no valid API key.

    It has an effect only if the gateway requires no API keys. A page is foreign if its origin is neither the gateway's
    own origin nor in `gateway.cors_origins`. A gateway that listens on loopback also rejects requests without a key if
    their `Host` header is not a loopback name. This middleware runs before all other middleware.
    """

    def __init__(self, app: ASGIApp, section: GatewaySection, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in section.cors_origins)
        host = section.listen.host
        listen_host = (f"[{host}]" if ":" in host else host).lower().encode()
        self._hosts = _LOCAL_HOSTS | {listen_host} if is_loopback(host) and not section.insecure else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the wrapped application, or reject it with an error response."""
        rejection = self._rejection(scope["headers"]) if scope["type"] == "http" else None
        await (self._app if rejection is None else error_response(rejection))(scope, receive, send)

    def _rejection(self, headers: Headers) -> ApiError | None:
        host, origin = host_and_origin(headers)
        code = "host_not_allowed" if self._is_foreign_host(host) else "origin_not_allowed" if origin else None
        if code is None or self._authenticator.require_auth:
            return None
        if code == "origin_not_allowed" and self._may_call(origin, host):
            return None
        try:
            if self._authenticator.admit(headers) is not None:
                return None
        except ApiError as error:
            return error
        return ApiError(403, code, _MESSAGES[code])

    def _is_foreign_host(self, host: bytes) -> bool:
        return self._hosts is not None and host != b"" and without_port(host) not in self._hosts

    def _may_call(self, origin: bytes, host: bytes) -> bool:
        return is_same_origin(origin, host) or origin in self._origins or b"*" in self._origins


_MESSAGES = {
    "origin_not_allowed": "the page's origin is not allowed; add it to gateway.cors_origins, or send an API key",
    "host_not_allowed": "without an API key, the host must be localhost, 127.0.0.1 or ::1; gateway.insecure allows all",
}
