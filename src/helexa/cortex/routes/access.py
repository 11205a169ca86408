"""Access control of routes. Every route declares its required access, so no route is public by mistake."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from helexa.cortex.access.principal import Principal
from helexa.cortex.gateway import Gateway
from helexa.http.connections.request_head import Headers

Endpoint = Callable[[Request], Awaitable[Response]]


def public(endpoint: Endpoint) -> Endpoint:
    """Return `endpoint` unchanged. This marks a route as public: requests need no key."""
    return endpoint


def user(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` to require a valid key, if the setting `require_auth` is true.

    The wrapper sets `request.state.principal` to the account and key of the request, or to None for an anonymous one.
    """
    return _guard(endpoint, lambda gateway, headers: gateway.authenticator.admit(headers))


def viewer(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` to require an admin's key, if the setting `require_auth` is true.

    Otherwise no key is required.
    """

    def admit(gateway: Gateway, headers: Headers) -> Principal | None:
        authenticator = gateway.authenticator
        return (
            authenticator.admit_admin(headers)
            if gateway.config.entitlements.require_auth
            else authenticator.admit(headers)
        )

    return _guard(endpoint, admit)


def admin(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` to require an admin's key, even if the setting `require_auth` is false."""
    return _guard(endpoint, lambda gateway, headers: gateway.authenticator.admit_admin(headers))


def _guard(endpoint: Endpoint, admit: Callable[[Gateway, Headers], Principal | None]) -> Endpoint:
    async def admitted(request: Request) -> Response:
        request.state.principal = admit(request.app.state.gateway, request.headers.raw)
        return await endpoint(request)

    return admitted
