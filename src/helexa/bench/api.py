"""HTTP routes of the API, its JSON and CSV output, and its OpenAPI document."""

import csv
import io
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any

import orjson
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from helexa.bench.api_queries import QUESTIONS, RUN_FILTERS, ApiQuery, Parameter, Parameters, QueryExecutor, read_query
from helexa.bench.results.archive import Archive
from helexa.bench.results.runs_and_scores import runs
from helexa.bench.store.row_types import RunRow
from helexa.core.errors import ApiError
from helexa.core.version import __version__

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_csv(rows: Sequence[Any], *, head: bool = True) -> bytes:
    """Return `rows` as CSV. Lists and dicts become JSON.

    A text that a spreadsheet would read as a formula gets a leading `'`.

    Args:
        rows: dataclass instances of the same type.
        head: True to write a header line with the field names, if there are rows.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    if rows and head:
        writer.writerow(columns(rows[0]))
    writer.writerows(map(_cells, rows))
    return text.getvalue().encode()


def columns(row: Any) -> list[str]:
    """Return the columns of a row in the API's CSV export: the dataclass's fields."""
    return [field.name for field in fields(row)]


def _cells(row: Any) -> Iterable[object]:
    for name in columns(row):
        value = getattr(row, name)
        if isinstance(value, str) and value.startswith(_FORMULA):
            yield f"'{value}"  # keeps spreadsheets from executing a model's name as a formula
        elif value is None or isinstance(value, str | int | float):
            yield value
        else:
            yield orjson.dumps(value).decode()


_DESCRIPTION = """\
Read-only access to all measurements that the web pages show. Names of fields are the same as on the pages.

Fields that end with `_s` are durations in seconds. Fields that end with `_ms` are durations in milliseconds or times in
UTC epoch milliseconds. `null` means not measured. Lists of rows are also available as CSV, with `format=csv`."""
_ERROR_RESPONSES = {
    "400": "A parameter is unknown, missing or invalid",
    "404": "The named item does not exist",
    "500": "Internal error of helexa-bench",
    "503": "The database does not exist yet, or too many requests are waiting",
}


@cache
def document() -> bytes:
    """Return the OpenAPI document of the benchmark's API as JSON."""
    adapters = {query.path: TypeAdapter(query.shape) for query in QUESTIONS} | {"export": TypeAdapter(RunRow)}
    shapes, definitions = TypeAdapter.json_schemas(
        [(path, "serialization", adapter) for path, adapter in adapters.items()],
        ref_template="#/components/schemas/{model}",
    )
    paths = {
        f"/api/v1/{query.path}": {"get": _operation(query, shapes[(query.path, "serialization")])}
        for query in QUESTIONS
    }
    paths["/api/v1/export/runs"] = {
        "get": {
            "operationId": "exportRuns",
            "summary": "Export all samples that match the filters, as JSON lines or as CSV",
            "parameters": _parameters(_with_format(RUN_FILTERS)),
            "responses": {
                "200": {
                    "description": "Success",
                    "content": {
                        "application/x-ndjson": {"schema": shapes[("export", "serialization")]},
                        "text/csv": {"schema": {"type": "string"}},
                    },
                },
                **_error_responses(),
            },
        }
    }
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "helexa-bench", "version": __version__, "description": _DESCRIPTION},
            "servers": [{"url": "/"}],
            "paths": paths,
            "components": {"schemas": definitions.get("$defs", {})},
        }
    )


def _operation(query: ApiQuery, shape: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": shape}}
    if query.table:
        content["text/csv"] = {"schema": {"type": "string"}}
    return {
        "operationId": f"get{query.path.title()}",
        "summary": query.summary,
        "parameters": _parameters(_with_format(query.parameters) if query.table else query.parameters),
        "responses": {"200": {"description": "Success", "content": content}, **_error_responses()},
    }


def _parameters(parameters: Parameters) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "description": parameter.about,
            "required": parameter.required,
            "schema": parameter.schema(),
        }
        for name, parameter in parameters.items()
    ]


def _with_format(parameters: Parameters) -> Parameters:
    return {**parameters, "format": Parameter("json or csv", default="json", choices=("json", "csv"))}


def _error_responses() -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {status: {"description": about, "content": text} for status, about in _ERROR_RESPONSES.items()}


_PAGE = 1000
_CORS = {"access-control-allow-origin": "*"}
_CSV = "text/csv; charset=utf-8; header=present"


def routes() -> list[Route]:
    """Return the routes of all queries, the export and the OpenAPI document.

    Each query has a route below `/api/` and one below `/api/v1/`. The handlers need a `QueryExecutor` as the
    application's `state.query_executor`.
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
    """Return the API's response for `error` as one line of plain text.

    Errors other than `ApiError` get status 500.
    """
    status = error.status if isinstance(error, ApiError) else 500
    headers = error.headers() if isinstance(error, ApiError) else {}
    text = str(error) if isinstance(error, ApiError) else "internal error; see the server's log"
    return Response(text + "\n", status, _CORS | headers, "text/plain")


async def _query_response(query: ApiQuery, request: Request) -> Response:
    parameters = _with_format(query.parameters) if query.table else query.parameters
    arguments = read_query(request.query_params, parameters)
    encode = to_csv if arguments.get("format") == "csv" else orjson.dumps

    def find(archive: Archive) -> bytes:
        try:
            return encode(query.answer(archive, arguments))
        except LookupError as error:
            raise ApiError(404, "not_found", str(error.args[0])) from None

    body = await _executor(request).ask(find)
    return Response(body, media_type=_CSV if encode is to_csv else "application/json", headers=_CORS)


async def _export(request: Request) -> Response:
    query = read_query(request.query_params, _with_format(RUN_FILTERS))
    kind = query["format"]
    chunks = _all_runs(_executor(request), query, to_csv if kind == "csv" else None)
    first = await anext(chunks)  # before the status is sent, because the database may be missing

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(
        body(),
        media_type=_CSV if kind == "csv" else "application/x-ndjson",
        headers=_CORS | {"content-disposition": f'attachment; filename="runs.{"csv" if kind == "csv" else "jsonl"}"'},
    )


async def _all_runs(
    executor: QueryExecutor, query: dict[str, Any], table: Callable[..., bytes] | None
) -> AsyncIterator[bytes]:
    """Yield the runs that match `query` in chunks, as `table` output or JSON lines."""
    offset, page = 0, [object()] * _PAGE
    while len(page) == _PAGE:
        page = await executor.ask(partial(runs, filters=query, limit=_PAGE, offset=offset))
        if table is not None:
            yield table(page, head=offset == 0)
        else:
            yield b"".join(orjson.dumps(row) + b"\n" for row in page)
        offset += _PAGE


async def _document(_request: Request) -> Response:
    return Response(document(), media_type="application/json", headers=_CORS)


def _executor(request: Request) -> QueryExecutor:
    return request.app.state.query_executor
