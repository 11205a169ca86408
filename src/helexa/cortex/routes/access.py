"""Access control of routes. Every route declares its access, so that no route is public by omission."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from helexa.cortex.access.principal import Principal
from helexa.cortex.gateway import Gateway
from helexa.http.connections.request_head import Headers

Endpoint = Callable[[Request], Awaitable[Response]]


def public(endpoint: Endpoint) -> Endpoint:
    """Return `endpoint` unchanged. Marks a route as public: all requests are allowed, without a key."""
    return endpoint


def user(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` to require a valid key if `require_auth` is true, and to set `request.state.principal`."""
    return _guard(endpoint, lambda gateway, headers: gateway.gatekeeper.admit(headers))


def viewer(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` to require an admin's key if `require_auth` is true. Otherwise no key is required."""

    def admit(gateway: Gateway, headers: Headers) -> Principal | None:
        gatekeeper = gateway.gatekeeper
        return (
            gatekeeper.admit_admin(headers) if gateway.config.entitlements.require_auth else gatekeeper.admit(headers)
        )

    return _guard(endpoint, admit)


def admin(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` to require an admin's key, even if `require_auth` is false."""
    return _guard(endpoint, lambda gateway, headers: gateway.gatekeeper.admit_admin(headers))


def _guard(endpoint: Endpoint, admit: Callable[[Gateway, Headers], Principal | None]) -> Endpoint:
    async def admitted(request: Request) -> Response:
        request.state.principal = admit(request.app.state.gateway, request.headers.raw)
        return await endpoint(request)

    return admitted
