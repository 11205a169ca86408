"""Access control of routes. Every route declares its required access, so no route is public by mistake."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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


def holder(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` to require a valid key of any role, even if the setting `require_auth` is false."""
    return _guard(endpoint, lambda gateway, headers: gateway.authenticator.admit_key(headers))


def admin(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` to require an admin's key, even if the setting `require_auth` is false."""
    return _guard(endpoint, lambda gateway, headers: gateway.authenticator.admit_admin(headers))


def visible_account(request: Request) -> str | None:
    """Return the account whose data the principal of a request may see, or None for the data of all accounts.

    A user's key may see its own account. Admins may see all accounts, and so may anonymous clients, which exist only if
    the setting `require_auth` is false.
    """
    principal: Principal | None = request.state.principal
    return principal.account_id if principal is not None and principal.role == "user" else None


def method_route(path: str, **endpoints: Endpoint) -> Route:
    """Return one route for a path. `endpoints` maps each HTTP method to its endpoint.

    With one route for all methods, a 405 response lists all of them.
    """

    async def dispatch(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, dispatch, methods=list(endpoints))


def _guard(endpoint: Endpoint, admit: Callable[[Gateway, Headers], Principal | None]) -> Endpoint:
    async def admitted(request: Request) -> Response:
        request.state.principal = admit(request.app.state.gateway, request.headers.raw)
        return await endpoint(request)

    return admitted
