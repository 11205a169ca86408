"""Routes of health, version, OpenAPI document, activity, usage and history.

`GET /health` and `GET /` return the state of the fleet. `GET /health/ready` returns whether this gateway can serve
requests now.
"""

import asyncio
import csv
import io
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, cast, get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response

from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError
from helexa.core.node_reports import Cost
from helexa.core.version import build_identity
from helexa.cortex.fleet.fleet import FleetView, Node
from helexa.cortex.fleet_history import By
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.activity_and_usage_totals import GROUPS, MAX_CHARGE_ROWS, SUMS
from helexa.cortex.routes.access_and_errors import visible_account
from helexa.http.responses import JsonResponse, readiness

_TEXTS = ("account_id", "key_id", "model", "node")


async def get_health(request: Request) -> Response:
    """`GET /health`: respond with the state of the fleet."""
    # The HTTP status is 200 even if no node is healthy, because the gateway itself is alive.
    return JsonResponse(fleet_health(_view(request)))


async def get_readiness(request: Request) -> Response:
    """`GET /health/ready`: respond with 200 if this gateway can serve now, else 503."""
    # The gateway is ready if it is not shutting down, the ledger's database accepts a write, and at least one node is
    # healthy. The response contains no error details, because the route is public.
    gateway: Gateway = request.app.state.gateway
    nodes = _view(request).nodes
    return readiness(
        {
            "gateway": "the gateway is shutting down" if gateway.drain.begun else None,
            "ledger": None if await gateway.ledger.writable() else "the ledger's database is not writable",
            "nodes": None if any(node.healthy for node in nodes) else f"none of {len(nodes)} nodes is healthy",
        }
    )


async def get_version(request: Request) -> Response:
    """`GET /version`: respond with version, commit and build time of the gateway."""
    return JsonResponse(await asyncio.to_thread(build_identity))


def fleet_health(view: FleetView) -> dict[str, Any]:
    """Return the fleet's state, node counts, and the models that nodes cannot serve.

    The field `status` has one of these values:

    * `degraded`: no node is healthy.
    * `impaired`: a healthy node reports a model that it cannot serve now.
    * `ok`: none of the above.
    """
    healthy = [node for node in view.nodes if node.healthy]
    unservable = [entry for node in healthy for entry in _unservable(node)]
    status = "degraded" if not healthy else "impaired" if unservable else "ok"
    report: dict[str, Any] = {"status": status, "nodes": {"healthy": len(healthy), "total": len(view.nodes)}}
    return report | ({"unservable": unservable} if unservable else {})


def _unservable(node: Node) -> list[dict[str, Any]]:
    return [
        {"node": node.name, "model": info.id}
        | info.servable.model_dump(include={"reason", "detail"}, exclude_none=True)
        for info in node.models.values()
        if info.servable is not None and not info.servable.ok
    ]


def _view(request: Request) -> FleetView:
    gateway: Gateway = request.app.state.gateway
    return gateway.fleet.view()


async def get_document(_request: Request) -> Response:
    """`GET /openapi.json`: respond with the OpenAPI document."""
    return Response(_encoded(), media_type="application/json")


@cache
def _encoded() -> bytes:
    # Importing this module also imports the types of all bodies, which takes 35 ms of CPU time. Importing it here keeps
    # these 35 ms out of the gateway's start.
    from helexa.cortex.api.openapi import document

    return orjson.dumps(document())


async def list_activity(request: Request) -> Response:
    """`GET /api/activity`: respond with recent requests, newest first.

    Query parameters: `limit` (default 100, maximum 1000), `before` (only rows with a smaller id), and the filters
    `account_id`, `key_id`, `model`, `node` and `status`. A user gets the requests of the user's account.
    """
    gateway: Gateway = request.app.state.gateway
    filters: dict[str, str | int | None] = {name: request.query_params.get(name) for name in _TEXTS}
    filters["account_id"] = _account_filter(request)
    rows = await gateway.ledger.recent(
        _read_number(request, "limit") or 100,
        _read_number(request, "before"),
        status=_read_number(request, "status"),
        **filters,
    )
    return JsonResponse({"requests": rows})


def _account_filter(request: Request) -> str | None:
    """Return the account that a report is about, or None for all accounts.

    Raises:
        ApiError: 403 if a user asks for the data of another account.
    """
    asked, visible = request.query_params.get("account_id"), visible_account(request)
    if visible is not None and asked not in (None, visible):
        raise ApiError(
            403, "admin_only", "only an admin may see other accounts; send an admin's API key", param="account_id"
        )
    return visible or asked


def _read_number(request: Request, name: str) -> int | None:
    """Return the value of an integer query parameter; None if it is absent.

    Raises:
        ApiError: 400 if the value is not a non-negative integer of at most 15 digits.
    """
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(
            400,
            "invalid_parameter",
            f"'{name}' must be a non-negative integer of at most 15 digits, not {text[:80]!r}",
            param=name,
        )
    return int(text)


DEFAULT_DAYS = 30
MAX_DAYS = 366
DEFAULT_GROUPS = ("day", "account_id", "key_id", "model")
_DAY_SECS = 86_400
_TOKENS_PER_PRICE = 1_000_000
_COST_COLUMNS = ("cost", "unpriced")
_FORMATS = ("json", "csv")
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


async def get_usage(request: Request) -> Response:
    """`GET /api/usage`: report the token charges of the last `days` days.

    Query parameters: `days` (default 30, including today), `by` (a comma-separated list out of `GROUPS`; default:
    `DEFAULT_GROUPS`), `format` (`json` or `csv`), and the filters `account_id`, `key_id` and `model`. A user gets the
    charges of the user's account.
    """
    gateway: Gateway = request.app.state.gateway
    query = request.query_params
    days = _read_number(request, "days")
    days = DEFAULT_DAYS if days is None else days
    if not 1 <= days <= MAX_DAYS:
        raise ApiError(
            400, "invalid_parameter", f"'days' must be an integer from 1 to {MAX_DAYS}, not {days}", param="days"
        )
    groups = [name for name in query.get("by", ",".join(DEFAULT_GROUPS)).split(",") if name]
    if len(set(groups)) != len(groups) or not set(groups) <= set(GROUPS):
        raise ApiError(400, "invalid_parameter", f"'by' must list different names of {', '.join(GROUPS)}", param="by")
    format = query.get("format", "json")
    if format not in _FORMATS:
        raise ApiError(
            400,
            "invalid_parameter",
            f"'format' must be one of {', '.join(_FORMATS)}, not {format[:80]!r}",
            param="format",
        )
    filters = {"account_id": _account_filter(request), "key_id": query.get("key_id"), "model": query.get("model")}
    today = int(time.time()) // _DAY_SECS
    by_model = [*dict.fromkeys((*groups, "model"))]  # also sum by model, because each model has its own price
    rows = await gateway.ledger.charges(range(today - days + 1, today + 1), by_model, **filters)
    if len(rows) > MAX_CHARGE_ROWS:
        message = f"the result has more than {MAX_CHARGE_ROWS} rows; ask for fewer days, or group by fewer names"
        raise ApiError(400, "too_many_rows", message, param="days")
    rows = _with_costs(rows, groups, gateway.catalog)
    if format == "json":
        return JsonResponse({"days": days, "usage": rows})
    headers = {"content-disposition": 'attachment; filename="helexa-usage.csv"'}
    return Response(_csv(rows, groups), headers=headers, media_type="text/csv")


def _with_costs(rows: Sequence[dict[str, Any]], groups: Sequence[str], catalog: Catalog) -> list[dict[str, Any]]:
    """Add costs to rows summed by model, and add up rows with equal `groups`.

    `cost` is in USD, at the prices that the catalog has now. It is None if no model of the row has a price.
    `unpriced` is the number of requests to models without a price.
    """
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        names = {name: row[name] for name in groups}
        total = sums.setdefault(tuple(names.values()), names | dict.fromkeys(SUMS, 0) | {"cost": None, "unpriced": 0})
        for name in SUMS:
            total[name] += row[name]
        profile = catalog.profile(row["model"])
        if profile is None or profile.cost is None:
            total["unpriced"] += row["requests"]
        else:
            total["cost"] = round((total["cost"] or 0.0) + _cost(row, profile.cost), 9)
    return [sums[names] for names in sorted(sums)]


def _cost(row: dict[str, Any], price: Cost) -> float:
    """Return the cost of a row's tokens in USD."""
    cached_price = price.input if price.cache_read is None else price.cache_read
    cached = min(row["cached"], row["prompt"])
    return (
        (row["prompt"] - cached) * price.input + cached * cached_price + row["completion"] * price.output
    ) / _TOKENS_PER_PRICE


def _csv(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    columns = [*groups, *SUMS, *_COST_COLUMNS]
    writer.writerow(columns)
    writer.writerows([_cell(row[name]) for name in columns] for row in rows)
    return text.getvalue()


def _cell(value: str | float | None) -> str | float | None:
    """Return a value as a CSV cell that no spreadsheet executes as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


DEFAULT_LIMIT = 5
MAX_LIMIT = 50


async def get_history(request: Request) -> Response:
    """`GET /api/history`: report the history of the fleet, or of nodes or models.

    Query parameters: `by` (`fleet`, `node` or `model`; default: `fleet`), and `limit` (default 5, maximum 50): the
    number of nodes or models with their own series. One more series has the sums of all others.
    """
    gateway: Gateway = request.app.state.gateway
    by = request.query_params.get("by", "fleet")
    if by not in get_args(By):
        raise ApiError(
            400, "invalid_parameter", f"'by' must be one of {', '.join(get_args(By))}, not {by[:80]!r}", param="by"
        )
    limit = _read_number(request, "limit")
    if limit is not None and not 1 <= limit <= MAX_LIMIT:
        raise ApiError(
            400, "invalid_parameter", f"'limit' must be an integer from 1 to {MAX_LIMIT}, not {limit}", param="limit"
        )
    return JsonResponse(gateway.history.report(cast("By", by), limit or DEFAULT_LIMIT))
