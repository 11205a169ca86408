"""Who may use a route: every route says so, and nothing is open by forgetting."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from helexa.cortex.gateway import Gateway

Endpoint = Callable[[Request], Awaitable[Response]]


def public(endpoint: Endpoint) -> Endpoint:
    """For everybody."""
    return endpoint


def user(endpoint: Endpoint) -> Endpoint:
    """For everybody who may ask models; `request.state.principal` says who it is."""

    async def admitted(request: Request) -> Response:
        request.state.principal = _gateway(request).gatekeeper.admit(request.headers.raw)
        return await endpoint(request)

    return admitted


def viewer(endpoint: Endpoint) -> Endpoint:
    """For whoever may see what the whole fleet does: admins; everybody where no key is required."""

    async def admitted(request: Request) -> Response:
        gateway = _gateway(request)
        if gateway.config.entitlements.require_auth:
            gateway.gatekeeper.admit_admin(request.headers.raw)
        else:
            gateway.gatekeeper.admit(request.headers.raw)
        return await endpoint(request)

    return admitted


def admin(endpoint: Endpoint) -> Endpoint:
    """For admins."""

    async def admitted(request: Request) -> Response:
        request.state.principal = _gateway(request).gatekeeper.admit_admin(request.headers.raw)
        return await endpoint(request)

    return admitted


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway
