"""`GET /api/activity`: the newest finished requests, from the activity log."""

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError
from helexa.cortex.gateway import Gateway
from helexa.http.json_response import JsonResponse

_TEXTS = ("account_id", "key_id", "model", "node")


async def list_activity(request: Request) -> Response:
    """Return recent requests from the activity log, newest first.

    Query parameters: `limit` (default 100, maximum 1000), `before` (only rows with a smaller id), and the filters
    `account_id`, `key_id`, `model`, `node` and `status`.
    """
    gateway: Gateway = request.app.state.gateway
    filters: dict[str, str | int | None] = {name: request.query_params.get(name) for name in _TEXTS}
    rows = await gateway.ledger.recent(
        _number(request, "limit") or 100, _number(request, "before"), status=_number(request, "status"), **filters
    )
    return JsonResponse({"requests": rows})


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, "invalid_parameter", f"'{name}' must be a non-negative integer", param=name)
    return int(text)
