"""The gateway's API as an OpenAPI 3.1 document."""

import re
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from helexa.core.version import __version__
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.openai_completions import CompletionRequest
from helexa.core.wire.responses_request import CompactRequest, ResponsesRequest
from helexa.core.wire.tokens_and_embeddings import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from helexa.cortex.api.openapi_operations import COUNT, NAME, OPERATIONS, Operation, Schema

_SCHEMA_PATH = "#/components/schemas/{model}"
_MODEL_REQUIRED = (ChatRequest, CompletionRequest, ResponsesRequest, CompactRequest, EmbeddingsRequest)
_MODEL_OPTIONAL = (TokenizeRequest, DetokenizeRequest)

_STATUS_TEXTS = {
    400: "the request is malformed, or a field is missing or wrong",
    401: "the key is missing or invalid",
    403: "the key does not allow this, or the request's origin or host name is not allowed",
    404: "the model, path or object does not exist",
    408: "the request body did not arrive in time",
    409: "the object exists already, or cannot be changed",
    413: "the request body is too large",
    415: "the content type is not application/json, or the request body is compressed",
    422: "the model's chat template rejects the messages, or a node that joins cannot be verified",
    429: "a rate limit or the budget of the key is exhausted",
    431: "the request head is too large",
    500: "internal error of the gateway",
    502: "the node did not respond, or its response is incomplete",
    503: "no node can serve the request now",
}
_RETRIED = (429, 503)
_EVERYWHERE = (400, 403, 431, 500)
_OF_BODIES = (408, 413, 415)
_OF_ACCESS = {"public": (), "user": (401,), "admin": (401, 503)}

_KEYS = [{"bearer": []}, {"apiKey": []}]
_SECURITY: dict[str, list[dict[str, list[str]]]] = {"public": [], "user": [*_KEYS, {}], "admin": _KEYS}

_DESCRIPTION = """\
One address for all models of a fleet, with OpenAI- and Anthropic-compatible APIs.

Requests need a key if `entitlements.require_auth` is true. Changes of keys and nodes always need an admin's key.
Malformed HTTP requests and requests of web pages from other origins get an error in OpenAI's format on every path."""


@cache
def document() -> dict[str, Any]:
    """Return the gateway's OpenAPI document. Callers must not change the cached dict."""
    by_type, components = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        method, _, path = operation.route.partition(" ")
        paths.setdefault(path, {})[method.lower()] = _operation_object(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "cortex", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {"RetryAfter": {"description": "seconds to wait before a retry", "schema": COUNT}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation_object(operation: Operation, schemas: dict[Any, Schema]) -> dict[str, Any]:
    """Return the OpenAPI object of `operation`. `schemas` has the schema of each type."""
    path = operation.route.partition(" ")[2]
    fields: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [path.split("/")[1] or "health"],
        "security": _SECURITY[operation.access],
        "responses": _responses(operation, schemas),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": NAME} for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": name in operation.required, "schema": schema}
        for name, schema in operation.query.items()
    ]
    if parameters:
        fields["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": schemas[operation.body]}}
        fields["requestBody"] = {"required": True, "content": content}
    return fields


def _responses(operation: Operation, schemas: dict[Any, Schema]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": schemas[operation.reply]}}
    if operation.streamed:
        content["text/event-stream"] = {"schema": {"description": "events of the API, if `stream` is true"}}
    for media_type, description in operation.other_types.items():
        content[media_type] = {"schema": {"type": "string", "description": description}}
    responses: dict[str, Any] = {str(operation.status): {"description": "success", "content": content}}
    error_content = {"application/json": {"schema": schemas[operation.error]}}
    of_body = () if operation.body is None else _OF_BODIES
    for status in sorted({*_EVERYWHERE, *of_body, *_OF_ACCESS[operation.access], *operation.errors}):
        responses[str(status)] = {"description": _STATUS_TEXTS[status], "content": error_content}
        if status in _RETRIED:
            responses[str(status)]["headers"] = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}}
    if operation.unready:
        responses["503"] = {"description": "a component is not ready", "content": content}
    if operation.forwards_errors:
        responses["default"] = {"description": "error response of a node", "content": error_content}
    return responses


def _schemas() -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """Return the schema of each type, and the document's schemas by name."""
    received = dict.fromkeys(type for operation in OPERATIONS for type in (operation.reply, operation.error))
    sent = dict.fromkeys(operation.body for operation in OPERATIONS if operation.body is not None)
    inputs = [(type, "serialization", TypeAdapter[Any](type)) for type in received]
    inputs += [(type, "validation", TypeAdapter[Any](type)) for type in sent]
    by_type, derived = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMA_PATH)  # pyright: ignore[reportArgumentType]
    definitions = {name: _terse(schema) for name, schema in derived["$defs"].items()}
    for request in (*_MODEL_REQUIRED, *_MODEL_OPTIONAL):
        schema = definitions[request.__name__]
        schema["properties"]["model"] = NAME | {"description": "A model id or an alias."}
        if request in _MODEL_REQUIRED:
            schema["required"] = [*schema.get("required", ()), "model"]
    return {type: schema for (type, _), schema in by_type.items()}, definitions


def _terse(schema: Any) -> Any:
    """Return a schema without titles and with short descriptions."""
    # Titles are removed because they only repeat the names of classes and fields.
    if isinstance(schema, list):
        return [_terse(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shortened = {name: _terse(value) for name, value in schema.items() if name != "title" or not isinstance(value, str)}
    if isinstance(text := shortened.get("description"), str):
        shortened["description"] = text.partition("\n\n")[0]
    return shortened
