"""Generates the OpenAPI 3.1 document of the benchmark API from the definitions of its queries."""

from functools import cache
from typing import Any

import orjson
from pydantic import TypeAdapter

from helexa.bench.api.queries import QUESTIONS, RUN_FILTERS, ApiQuery
from helexa.bench.api.query import Parameters
from helexa.bench.store.rows import RunRow
from helexa.core.version import __version__

_DESCRIPTION = """\
What was measured, read only. Every number of the pages is here under the same name.

Durations are seconds where a name ends with `_s` and milliseconds where it ends with `_ms`; moments are UTC epoch
milliseconds. `null` is what was not measured. Answers that are lists of rows are CSV with `format=csv`."""
_ERROR_RESPONSES = {
    "400": "a parameter is unknown, missing or wrong",
    "404": "there is no such thing",
    "500": "a fault of ours",
    "503": "there is no database yet, or too much is asked at once",
}


@cache
def document() -> bytes:
    """Return the OpenAPI document as JSON."""
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
            "summary": "All runs that pass the filters, as lines of JSON or as CSV",
            "parameters": [*_parameters(RUN_FILTERS), _FORMAT],
            "responses": {
                "200": {
                    "description": "as asked",
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


_FORMAT = {
    "name": "format",
    "in": "query",
    "description": "json or csv",
    "schema": {"type": "string", "enum": ["json", "csv"], "default": "json"},
}


def _operation(query: ApiQuery, shape: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": shape}}
    if query.table:
        content["text/csv"] = {"schema": {"type": "string"}}
    return {
        "operationId": f"get{query.path.title()}",
        "summary": query.summary,
        "parameters": [*_parameters(query.parameters), *([_FORMAT] if query.table else [])],
        "responses": {"200": {"description": "as asked", "content": content}, **_error_responses()},
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


def _error_responses() -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {status: {"description": about, "content": text} for status, about in _ERROR_RESPONSES.items()}
