"""`GET /api/usage`: sums of charged tokens by day, account, key and model, as JSON or CSV."""

import csv
import io
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.charges import GROUPS, MAX_ROWS, SUMS
from helexa.cortex.routes.activity import account_filter, read_number
from helexa.http.json_response import JsonResponse

DEFAULT_DAYS = 30
MAX_DAYS = 366

_DAY_SECS = 86_400
_FORMATS = ("json", "csv")
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


async def get_usage(request: Request) -> Response:
    """Respond with the charges of the last days.

    Query parameters: `days` (default 30, including today), `by` (a comma-separated list out of `day`, `account_id`,
    `key_id` and `model`; default: all), `format` (`json` or `csv`), and the filters `account_id`, `key_id` and `model`.
    A user gets the charges of the user's account.
    """
    gateway: Gateway = request.app.state.gateway
    query = request.query_params
    days = read_number(request, "days")
    days = DEFAULT_DAYS if days is None else days
    if not 1 <= days <= MAX_DAYS:
        raise ApiError(400, "invalid_parameter", f"'days' must be an integer from 1 to {MAX_DAYS}", param="days")
    groups = [name for name in query.get("by", ",".join(GROUPS)).split(",") if name]
    if len(set(groups)) != len(groups) or not set(groups) <= set(GROUPS):
        raise ApiError(400, "invalid_parameter", f"'by' must be a list of {', '.join(GROUPS)}", param="by")
    format = query.get("format", "json")
    if format not in _FORMATS:
        raise ApiError(400, "invalid_parameter", f"'format' must be one of {', '.join(_FORMATS)}", param="format")
    filters = {"account_id": account_filter(request), "key_id": query.get("key_id"), "model": query.get("model")}
    today = int(time.time()) // _DAY_SECS
    rows = await gateway.ledger.charges(range(today - days + 1, today + 1), groups, **filters)
    if len(rows) > MAX_ROWS:
        message = f"the result has more than {MAX_ROWS} rows; ask for fewer days, or group by fewer names"
        raise ApiError(400, "too_many_rows", message, param="days")
    if format == "json":
        return JsonResponse({"days": days, "usage": rows})
    headers = {"content-disposition": 'attachment; filename="helexa-usage.csv"'}
    return Response(_csv(rows, groups), headers=headers, media_type="text/csv")


def _csv(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    columns = [*groups, *SUMS]
    writer.writerow(columns)
    writer.writerows([_cell(row[name]) for name in columns] for row in rows)
    return text.getvalue()


def _cell(value: str | int) -> str | int:
    """Return a value as a CSV cell. Spreadsheets would execute a text that begins like a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value
