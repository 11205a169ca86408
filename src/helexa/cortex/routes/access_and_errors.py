"""Access control of routes, a guard against web pages, and error responses.

Every route declares its required access, so no route is public by mistake.
"""

import logging
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from helexa.core.address import is_loopback
from helexa.core.errors import ApiError, internal_error, service_unavailable
from helexa.core.logs import quoted
from helexa.cortex.access.auth import Authenticator
from helexa.cortex.access.keys import Principal
from helexa.cortex.anthropic.message_and_errors import VERSION_HEADER, error_headers, to_anthropic_error
from helexa.cortex.config import GatewaySection
from helexa.cortex.gateway import Gateway
from helexa.cortex.ollama.reply import to_ollama_error
from helexa.cortex.ollama.to_openai import is_ollama_path
from helexa.http.headers import Headers, host_and_origin, is_reserved_name, is_same_origin, request_id, without_port
from helexa.http.responses import JsonResponse

Endpoint = Callable[[Request], Awaitable[Response]]

log = logging.getLogger(__name__)

_ANTHROPIC_PATHS = ("/v1/messages",)
_DATABASE_RETRY_SECS = 5


def public(endpoint: Endpoint) -> Endpoint:
    """Return `endpoint` unchanged. This marks a route as public: requests need no key."""
    return endpoint


def user(endpoint: Endpoint) -> Endpoint:
    """Require a valid key for `endpoint`, if the setting `require_auth` is true.

    The wrapper sets `request.state.principal` to the account and key of the request, or to None if it is anonymous.
    """
    return _guard(endpoint, lambda gateway, headers: gateway.authenticator.admit(headers))


def viewer(endpoint: Endpoint) -> Endpoint:
    """Require an admin's key for `endpoint`, if the setting `require_auth` is true."""

    def admit(gateway: Gateway, headers: Headers) -> Principal | None:
        authenticator = gateway.authenticator
        return (
            authenticator.admit_admin(headers)
            if gateway.config.entitlements.require_auth
            else authenticator.admit(headers)
        )

    return _guard(endpoint, admit)


def holder(endpoint: Endpoint) -> Endpoint:
    """Require a valid key of any role for `endpoint`, whatever `require_auth` is."""
    return _guard(endpoint, lambda gateway, headers: gateway.authenticator.admit_key(headers))


def admin(endpoint: Endpoint) -> Endpoint:
    """Require an admin's key for `endpoint`, whatever `require_auth` is."""
    return _guard(endpoint, lambda gateway, headers: gateway.authenticator.admit_admin(headers))


def visible_account(request: Request) -> str | None:
    """Return the account whose data a request may read, or None for all accounts.

    The route must not be public, because only the other access functions set the principal.
    """
    principal: Principal | None = request.state.principal
    # Admins see all accounts, and so do anonymous clients, which exist only without `require_auth`.
    return principal.account_id if principal is not None and principal.role == "user" else None


def method_route(path: str, **endpoints: Endpoint) -> Route:
    """Return one route for a path. `endpoints` maps each HTTP method to its endpoint."""

    async def dispatch(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    # One route for all methods, so that a 405 response lists all of them.
    return Route(path, dispatch, methods=list(endpoints))


def _guard(endpoint: Endpoint, admit: Callable[[Gateway, Headers], Principal | None]) -> Endpoint:
    async def admitted(request: Request) -> Response:
        request.state.principal = admit(request.app.state.gateway, request.headers.raw)
        return await endpoint(request)

    return admitted


_LOCAL_HOSTS = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})


class OriginGuard:
    """Rejects requests from foreign web pages if they have no valid API key.

    It has an effect only if the gateway requires no API keys. A page is foreign if its origin is neither the gateway's
    own origin nor in `gateway.cors_origins`. A gateway that listens on loopback also rejects requests without a key if
    their `Host` header is neither a loopback name nor a reserved name such as `host.docker.internal`, under which
    containers reach this machine. This middleware runs before all other middleware.
    """

    def __init__(self, app: ASGIApp, section: GatewaySection, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in section.cors_origins)
        host = section.listen.host
        listen_host = (f"[{host}]" if ":" in host else host).lower().encode()
        self._hosts = _LOCAL_HOSTS | {listen_host} if is_loopback(host) and not section.insecure else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it with an error response."""
        rejection = self._rejection(scope["headers"]) if scope["type"] == "http" else None
        await (self._app if rejection is None else error_response(rejection, scope["path"]))(scope, receive, send)

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
        if self._hosts is None or host == b"" or (name := without_port(host)) in self._hosts:
            return False
        name = name.removesuffix(b".")  # DNS permits the dot at the end of a complete name
        return name not in self._hosts and not is_reserved_name(name)

    def _may_call(self, origin: bytes, host: bytes) -> bool:
        return is_same_origin(origin, host) or origin in self._origins or b"*" in self._origins


_MESSAGES = {
    "origin_not_allowed": "the page's origin is not allowed; add it to gateway.cors_origins, or send an API key",
    "host_not_allowed": (
        "without an API key, the host must be localhost, 127.0.0.1, ::1 or a name in .internal; "
        "use one of them, send an API key, or set gateway.insecure to allow any host"
    ),
}


def error_response(error: ApiError, path: str) -> Response:
    """Return the response for `error`, in Ollama's format for Ollama's paths."""
    body = to_ollama_error(error) if is_ollama_path(path) else error.envelope()
    return JsonResponse(body, error.status, error.headers())


async def handle_api_error(request: Request, error: Exception) -> Response:
    """Return the error response for an `ApiError` that a route raised."""
    assert isinstance(error, ApiError)
    return _error_response_for(request, error)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Return the response for an unknown path (404) or a wrong method (405)."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        hint = "; the client's base URL must not end in a slash" if "//" in path else ""
        return _error_response_for(request, ApiError(404, "unknown_path", f"unknown path {path}{hint}"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "a method that the API documentation names")
        message = f"{path} does not accept {request.method}; use {allowed}"
        response = _error_response_for(request, ApiError(405, "method_not_allowed", message))
        response.headers.update(error.headers or {})
        return response
    return _error_response_for(request, ApiError(error.status_code, None, error.detail))


async def handle_database_error(request: Request, error: Exception) -> Response:
    """Log the `DatabaseError` that a route raised, and return a 503 response."""
    log.warning(
        "request failed, because the ledger's database does not answer path=%s error=%s; the client got 503",
        quoted(request.url.path),
        quoted(error),
    )
    return _error_response_for(
        request, service_unavailable("the ledger's database does not answer; try again", _DATABASE_RETRY_SECS)
    )


async def handle_unexpected_error(request: Request, _error: Exception) -> Response:
    """Return a 500 response for an unexpected exception. The server logs it."""
    return _error_response_for(request, internal_error())


def _error_response_for(request: Request, error: ApiError) -> Response:
    """Return the response for `error` in the format of the client's API.

    A request uses Ollama's API if `is_ollama_path` says so. It uses Anthropic's API if its path begins with
    `/v1/messages`, or if it has the header `anthropic-version`.
    """
    path = request.url.path
    if is_ollama_path(path) or not (path.startswith(_ANTHROPIC_PATHS) or VERSION_HEADER in request.headers):
        return error_response(error, path)
    name = request_id(request.scope["headers"])
    return JsonResponse(to_anthropic_error(error, name), error.status, {"request-id": name, **error_headers(error)})
