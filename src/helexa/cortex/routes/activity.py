"""`GET /api/activity`: the newest finished requests, from the activity log."""

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError
from helexa.cortex.gateway import Gateway
from helexa.cortex.routes.access import visible_account
from helexa.http.json_response import JsonResponse

_TEXTS = ("account_id", "key_id", "model", "node")


async def list_activity(request: Request) -> Response:
    """Return recent requests from the activity log, newest first.

    Query parameters: `limit` (default 100, maximum 1000), `before` (only rows with a smaller id), and the filters
    `account_id`, `key_id`, `model`, `node` and `status`. A user gets the requests of the user's account.
    """
    gateway: Gateway = request.app.state.gateway
    filters: dict[str, str | int | None] = {name: request.query_params.get(name) for name in _TEXTS}
    filters["account_id"] = account_filter(request)
    rows = await gateway.ledger.recent(
        read_number(request, "limit") or 100,
        read_number(request, "before"),
        status=read_number(request, "status"),
        **filters,
    )
    return JsonResponse({"requests": rows})


def account_filter(request: Request) -> str | None:
    """Return the account whose data a request asks for, or None for all accounts.

    Raises:
        ApiError: 403 if a user asks for the data of another account.
    """
    asked, visible = request.query_params.get("account_id"), visible_account(request)
    if visible is not None and asked not in (None, visible):
        raise ApiError(403, "admin_only", "only an admin may see other accounts", param="account_id")
    return visible or asked


def read_number(request: Request, name: str) -> int | None:
    """Return the value of an integer query parameter, or None if it is absent.

    Raises:
        ApiError: 400 if the value is not a non-negative integer of at most 15 digits.
    """
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, "invalid_parameter", f"'{name}' must be a non-negative integer", param=name)
    return int(text)
