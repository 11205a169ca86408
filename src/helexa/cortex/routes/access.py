"""Who may use a route: every route says so, and nothing is open by forgetting."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from helexa.cortex.access.principal import Principal
from helexa.cortex.gateway import Gateway
from helexa.http.connections.request_head import Headers

Endpoint = Callable[[Request], Awaitable[Response]]


def public(endpoint: Endpoint) -> Endpoint:
    """For everybody."""
    return endpoint


def user(endpoint: Endpoint) -> Endpoint:
    """For everybody who may ask models; `request.state.principal` says who it is."""
    return _guarded(endpoint, lambda gateway, headers: gateway.gatekeeper.admit(headers))


def viewer(endpoint: Endpoint) -> Endpoint:
    """For whoever may see what the whole fleet does: admins; everybody where no key is required."""

    def admit(gateway: Gateway, headers: Headers) -> Principal | None:
        keeper = gateway.gatekeeper
        return keeper.admit_admin(headers) if gateway.config.entitlements.require_auth else keeper.admit(headers)

    return _guarded(endpoint, admit)


def admin(endpoint: Endpoint) -> Endpoint:
    """For admins."""
    return _guarded(endpoint, lambda gateway, headers: gateway.gatekeeper.admit_admin(headers))


def _guarded(endpoint: Endpoint, admit: Callable[[Gateway, Headers], Principal | None]) -> Endpoint:
    async def admitted(request: Request) -> Response:
        request.state.principal = admit(request.app.state.gateway, request.headers.raw)
        return await endpoint(request)

    return admitted
