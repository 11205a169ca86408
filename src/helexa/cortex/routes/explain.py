"""`GET /api/explain?model=`: shows how a request for a model would be routed, without sending one."""

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError
from helexa.cortex.lifecycle.explain import explain
from helexa.cortex.lifecycle.lifecycle import Lifecycle
from helexa.http.json_response import JsonResponse


async def get_explanation(request: Request) -> Response:
    """Respond with the current routing or loading decision for the model id or alias in the query.

    The query parameter `node` restricts the decision to one node. The parameter `without` excludes a node.
    """
    name = request.query_params.get("model", "")
    if not name:
        raise ApiError(
            400, "missing_model_field", "the query parameter 'model' is missing; write ?model=ID", param="model"
        )
    lifecycle: Lifecycle = request.app.state.gateway.lifecycle
    snapshot = lifecycle.snapshot()
    only, without = request.query_params.get("node"), request.query_params.get("without")
    if only is not None or without is not None:
        snapshot = snapshot.restricted(lambda node: only in (None, node) and node != without)
    return JsonResponse(explain(snapshot, name[:200]))
