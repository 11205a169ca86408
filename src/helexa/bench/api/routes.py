"""HTTP routes of the API. Scripts of any website may call the API (CORS). Errors are returned as one line of text."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from helexa.bench.api.openapi import document
from helexa.bench.api.queries import QUESTIONS, RUN_FILTERS, ApiQuery
from helexa.bench.api.query import Parameter, read_query
from helexa.bench.api.query_executor import QueryExecutor
from helexa.bench.api.table import to_csv
from helexa.bench.results.archive import Archive
from helexa.bench.results.runs import runs
from helexa.bench.store.rows import RunRow
from helexa.core.errors import ApiError

_FORMAT = Parameter("json or csv", default="json", choices=("json", "csv"))
_PAGE = 1000
_CORS = {"access-control-allow-origin": "*"}
_CSV = "text/csv; charset=utf-8; header=present"


def routes() -> list[Route]:
    """Return the routes of all queries, of the export of all runs, and of the OpenAPI document.

    Each query has a route below `/api/` and one below `/api/v1/`.
    """
    handlers = [
        Route(f"{base}/{query.path}", partial(_query_response, query), methods=["GET"])
        for query in QUESTIONS
        for base in ("/api", "/api/v1")
    ]
    return [
        *handlers,
        Route("/api/v1/export/runs", _export, methods=["GET"]),
        Route("/openapi.json", _document, methods=["GET"]),
    ]


async def api_error_response(_request: Request, error: Exception) -> Response:
    """Return the response for `error` as one line of plain text. Errors other than `ApiError` get status 500."""
    status = error.status if isinstance(error, ApiError) else 500
    headers = error.headers() if isinstance(error, ApiError) else {}
    text = str(error) if isinstance(error, ApiError) else "internal error; see the server's log"
    return Response(text + "\n", status, _CORS | headers, "text/plain")


async def _query_response(query: ApiQuery, request: Request) -> Response:
    parameters = {**query.parameters, "format": _FORMAT} if query.table else query.parameters
    arguments = read_query(request.query_params, parameters)
    encode = to_csv if arguments.get("format") == "csv" else _to_json

    def find(archive: Archive) -> bytes:
        try:
            return encode(query.answer(archive, arguments))
        except LookupError as error:
            raise ApiError(404, "not_found", str(error.args[0])) from None

    body = await _executor(request).ask(find)
    return Response(body, media_type=_CSV if encode is to_csv else "application/json", headers=_CORS)


async def _export(request: Request) -> Response:
    query = read_query(request.query_params, {**RUN_FILTERS, "format": _FORMAT})
    kind = query["format"]
    return StreamingResponse(
        _all_runs(_executor(request), query, to_csv if kind == "csv" else None),
        media_type=_CSV if kind == "csv" else "application/x-ndjson",
        headers=_CORS | {"content-disposition": f'attachment; filename="runs.{"csv" if kind == "csv" else "jsonl"}"'},
    )


async def _all_runs(
    executor: QueryExecutor, query: dict[str, Any], table: Callable[..., bytes] | None
) -> AsyncIterator[bytes]:
    """Yield the body of the export: all runs that match the filters, read from the database 1000 at a time."""
    offset, page = 0, [object()] * _PAGE
    while len(page) == _PAGE:
        page = await executor.ask(partial(_page, query, offset))
        if table is not None:
            yield table(page, head=offset == 0)
        else:
            yield b"".join(orjson.dumps(row) + b"\n" for row in page)
        offset += _PAGE


def _page(query: dict[str, Any], offset: int, archive: Archive) -> list[RunRow]:
    return runs(archive, query, limit=_PAGE, offset=offset)


async def _document(_request: Request) -> Response:
    return Response(document(), media_type="application/json", headers=_CORS)


def _to_json(answer: object) -> bytes:
    return orjson.dumps(answer)


def _executor(request: Request) -> QueryExecutor:
    return request.app.state.query_executor
