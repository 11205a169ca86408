"""Routes for stored responses of the Responses API, `/v1/responses/{id}`.

Requests are forwarded to the node that stores the response. The node is found by the prefix of the response id.
"""

from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError, unsupported_parameter
from helexa.cortex.fleet.node_client import NodeError
from helexa.cortex.gateway import Gateway


async def stored_response(request: Request) -> Response:
    """Handle `GET` and `DELETE /v1/responses/{id}`: return or delete a stored response.

    The node responds with 404 if the response belongs to another account or key.
    """
    for name in request.query_params:
        raise unsupported_parameter(name)
    return await _forward(request)


async def input_items(request: Request) -> Response:
    """Handle `GET /v1/responses/{id}/input_items`: return the input items of a stored response."""
    return await _forward(request, f"/input_items?{urlencode(request.query_params.multi_items())}")


async def _forward(request: Request, subpath: str = "") -> Response:
    gateway: Gateway = request.app.state.gateway
    principal = request.state.principal
    identity = {} if principal is None else principal.headers()
    id: str = request.path_params["response_id"]
    holder = gateway.fleet.view().holder(id)
    if holder is not None:
        try:
            bearer = gateway.fleet.bearer(holder.name)
            status, body = await gateway.client.response(request.method, holder.endpoint, id, identity, bearer, subpath)
        except NodeError:
            message = f"node '{holder.name}' did not respond"
            raise ApiError(502, "upstream_connection_error", message, type="api_error") from None
        if status != 404:
            return Response(body, status, media_type="application/json")
    raise ApiError(404, "response_not_found", f"response {id[:256]!r} not found", param="response_id")
