"""`GET` and `DELETE /v1/responses/{id}`: asked of the node that keeps the response, which its id tells."""

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError, unsupported_parameter
from helexa.cortex.fleet.node_client import NodeError
from helexa.cortex.gateway import Gateway


async def kept_response(request: Request) -> Response:
    """The response, or that it is forgotten now; 404 for whoever it does not belong to."""
    for name in request.query_params:
        raise unsupported_parameter(name)
    gateway: Gateway = request.app.state.gateway
    principal = request.state.principal
    identity = {} if principal is None else principal.headers()
    id: str = request.path_params["response_id"]
    holder = gateway.fleet.view().holder(id)
    body = None
    if holder is not None:
        try:
            bearer = gateway.fleet.bearer(holder.name)
            body = await gateway.client.response(request.method, holder.endpoint, id, identity, bearer)
        except NodeError:
            message = f"node '{holder.name}' did not answer"
            raise ApiError(502, "upstream_connection_error", message, type="api_error") from None
    if body is None:
        raise ApiError(404, "response_not_found", f"response {id[:256]!r} not found", param="response_id")
    return Response(body, media_type="application/json")
