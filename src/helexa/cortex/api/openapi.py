"""The gateway's API as an OpenAPI 3.1 document."""

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from helexa.core.version import __version__
from helexa.cortex.api.openapi_schemas import COUNT, NAME, STRING, Schema, ref, schemas

_STATUS_TEXTS = {
    400: "the request is malformed, or a field is missing or wrong",
    401: "the key is missing or invalid",
    403: "the key does not allow this, or the request's origin or host name is not allowed",
    404: "the model, path or object does not exist",
    408: "the request body did not arrive in time",
    409: "the object exists already, or cannot be changed",
    413: "the request body is too large",
    415: "the content type is not application/json, or the request body is compressed",
    422: "the model's chat template rejects the messages",
    429: "a rate limit or the budget of the key is exhausted",
    431: "the request head is too large",
    500: "internal error of the gateway",
    502: "the node did not respond, or its response is incomplete",
    503: "no node can serve the request now",
}
_RETRIED = (429, 503)
_EVERYWHERE = (400, 403, 431, 500)
_BODY = (408, 413, 415)
_GENERATION = (401, 404, *_BODY, 422, 429, 502, 503)
_ADMIN = (401, 503)

_DESCRIPTION = """\
One address for all models of a fleet, with OpenAI- and Anthropic-compatible APIs.

Requests need a key if `entitlements.require_auth` is true. Changes of keys and nodes always need an admin's key.
Malformed HTTP requests and requests of web pages from other origins get an error in OpenAI's format on every path."""


@dataclass(frozen=True)
class Operation:
    """An operation in the OpenAPI document: one HTTP method of one path.

    Attributes:
        id: operation id; client generators name functions after it.
        method: HTTP method in lower case.
        path: path template.
        summary: short description.
        response: name of the schema of a successful response.
        body: name of the schema of the request body, or None.
        query: schemas of all query parameters by name, required and optional.
        required: names of the required query parameters.
        error_statuses: HTTP error statuses of this operation. The statuses in `_EVERYWHERE` are added to every
            operation.
        error: name of the schema of error responses.
        status: HTTP status of a successful response.
        unready: True if a 503 response of the operation has the schema `response` instead of `error`.
        streamed: True if the operation can respond with an event stream.
        media_type: media type of a successful response.
        other_types: descriptions of other possible bodies of a successful response, by media type.
        forwards_errors: True if a node's error response is forwarded with its status.
        security: required access: `public`, `user` or `admin`.
    """

    id: str
    method: str
    path: str
    summary: str
    response: str
    body: str | None = None
    query: dict[str, Schema] = field(default_factory=dict[str, Schema])
    required: tuple[str, ...] = ()
    error_statuses: tuple[int, ...] = ()
    error: str = "Error"
    status: int = 200
    unready: bool = False
    streamed: bool = False
    media_type: str = "application/json"
    other_types: dict[str, str] = field(default_factory=dict[str, str])
    forwards_errors: bool = False
    security: str = "user"

    def operation_object(self) -> dict[str, Any]:
        """Return this operation as an OpenAPI operation object (JSON)."""
        operation: dict[str, Any] = {
            "operationId": self.id,
            "summary": self.summary,
            "tags": [self.path.split("/")[1] or "health"],
            "security": _SECURITY[self.security],
            "responses": self._responses(),
        }
        if parameters := [*map(_in_path, re.findall(r"{(\w+)}", self.path)), *map(self._in_query, self.query)]:
            operation["parameters"] = parameters
        if self.body is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(self.body)}}}
        return operation

    def _in_query(self, name: str) -> dict[str, Any]:
        return {"name": name, "in": "query", "required": name in self.required, "schema": self.query[name]}

    def _responses(self) -> dict[str, Any]:
        content: dict[str, Any] = {self.media_type: {"schema": ref(self.response)}}
        if self.streamed:
            content["text/event-stream"] = {"schema": {"description": "events of the API, if `stream` is true"}}
        for media_type, description in self.other_types.items():
            content[media_type] = {"schema": {"type": "string", "description": description}}
        responses: dict[str, Any] = {str(self.status): {"description": "success", "content": content}}
        error_content = {"application/json": {"schema": ref(self.error)}}
        for status in sorted({*_EVERYWHERE, *self.error_statuses}):
            responses[str(status)] = {"description": _STATUS_TEXTS[status], "content": error_content}
            if status in _RETRIED:
                responses[str(status)]["headers"] = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}}
        if self.unready:
            responses["503"] = {"description": "a component is not ready", "content": content}
        if self.forwards_errors:
            responses["default"] = {"description": "error response of a node", "content": error_content}
        return responses


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": NAME}


_KEYS = [{"bearer": []}, {"apiKey": []}]
_SECURITY: dict[str, list[dict[str, list[str]]]] = {"public": [], "user": [*_KEYS, {}], "admin": _KEYS}


def _generation(id: str, path: str, summary: str, body: str, response: str, **options: Any) -> Operation:
    return Operation(
        id, "post", path, summary, response, body, error_statuses=_GENERATION, forwards_errors=True, **options
    )


_NODE = {"error_statuses": (*_ADMIN, 404), "security": "admin"}
_KEY = {"error_statuses": (*_ADMIN, 404, 409), "security": "admin"}
_CHANGE = {"error_statuses": (*_ADMIN, 404, 409, *_BODY), "security": "admin"}
_FILTERS: dict[str, Schema] = dict.fromkeys(("account_id", "key_id", "model", "node"), STRING)
_LARGE_COUNT = COUNT | {"maximum": 10**15 - 1}
_WAIT_SECS = {"wait_secs": COUNT | {"maximum": 600}}

OPERATIONS = (
    _generation(
        "createChatCompletion",
        "/v1/chat/completions",
        "Create a chat completion",
        "ChatRequest",
        "ChatCompletion",
        streamed=True,
    ),
    _generation(
        "createCompletion",
        "/v1/completions",
        "Create a text completion",
        "CompletionRequest",
        "Completion",
        streamed=True,
    ),
    _generation(
        "createResponse",
        "/v1/responses",
        "Create a response",
        "ResponsesRequest",
        "ResponsesAnswer",
        streamed=True,
    ),
    Operation(
        "getResponse",
        "get",
        "/v1/responses/{response_id}",
        "Return a stored response",
        "ResponsesAnswer",
        error_statuses=(401, 404, 502),
    ),
    Operation(
        "deleteResponse",
        "delete",
        "/v1/responses/{response_id}",
        "Delete a stored response",
        "DeletedResponse",
        error_statuses=(401, 404, 502),
    ),
    Operation(
        "listInputItems",
        "get",
        "/v1/responses/{response_id}/input_items",
        "List the input items of a stored response",
        "ItemList",
        query={
            "limit": COUNT | {"minimum": 1, "maximum": 100},
            "order": {"enum": ["asc", "desc"]},
            "after": STRING,
            "include": STRING,
        },
        error_statuses=(401, 404, 502),
    ),
    _generation(
        "compactConversation",
        "/v1/responses/compact",
        "Replace a conversation by a summary",
        "CompactRequest",
        "Compaction",
    ),
    _generation(
        "createMessage",
        "/v1/messages",
        "Create a message (Anthropic's API)",
        "MessagesRequest",
        "Message",
        streamed=True,
        error="AnthropicError",
    ),
    Operation(
        "countTokens",
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a prompt; estimated if the model is not loaded",
        "TokenCount",
        "CountRequest",
        error_statuses=(401, 404, *_BODY, 429, 503),
        error="AnthropicError",
    ),
    *(
        Operation(
            id,
            "post",
            path,
            summary,
            response,
            body,
            error_statuses=(401, 404, *_BODY, 429, 502, 503),
            forwards_errors=True,
        )
        for id, path, summary, response, body in (
            ("tokenize", "/tokenize", "Tokenize a text or a conversation", "Tokens", "TokenizeRequest"),
            ("detokenize", "/detokenize", "Convert tokens to text", "Detokenized", "DetokenizeRequest"),
            (
                "countInputTokens",
                "/v1/responses/input_tokens",
                "Count the input tokens of a response",
                "InputTokens",
                "ResponsesRequest",
            ),
        )
    ),
    Operation(
        "getTokenizerInfo",
        "get",
        "/tokenizer_info",
        "Return a model's tokenizer settings",
        "TokenizerInfo",
        query={"model": NAME},
        error_statuses=(401, 404, 429, 502, 503),
        forwards_errors=True,
    ),
    _generation("createEmbedding", "/v1/embeddings", "Create embeddings", "EmbeddingsRequest", "Embeddings"),
    _generation("createImage", "/v1/images/generations", "Create images", "ImageRequest", "Images"),
    Operation("listModels", "get", "/v1/models", "List all models and aliases", "ModelList", error_statuses=(401,)),
    Operation(
        "getModel",
        "get",
        "/v1/models/{model}",
        "Return one model or alias; write slashes in the id as %2F",
        "Model",
        error_statuses=(401, 404),
    ),
    Operation("listNodes", "get", "/api/nodes", "List the nodes with their state", "NodeList", error_statuses=(401,)),
    Operation(
        "cordonNode",
        "post",
        "/api/nodes/{name}/cordon",
        "Send no new requests and loads to a node",
        "NodeState",
        **_NODE,
    ),
    Operation(
        "uncordonNode",
        "post",
        "/api/nodes/{name}/uncordon",
        "Send requests and loads to a node again",
        "NodeState",
        **_NODE,
    ),
    Operation(
        "drainNode",
        "post",
        "/api/nodes/{name}/drain",
        "Cordon a node and wait until its requests have ended",
        "NodeState",
        query=_WAIT_SECS,
        **_NODE,
    ),
    Operation(
        "loadModel",
        "post",
        "/api/models/load",
        "Load a model, and respond when it is loaded",
        "ModelState",
        "ModelLoadRequest",
        query=_WAIT_SECS,
        error_statuses=(*_ADMIN, 404, 409, *_BODY),
        security="admin",
    ),
    Operation(
        "unloadModel",
        "post",
        "/api/models/unload",
        "Unload a model from a node when its requests have ended",
        "ModelState",
        "ModelUnloadRequest",
        error_statuses=(*_ADMIN, 404, 409, 502, *_BODY),
        security="admin",
    ),
    Operation(
        "listActivity",
        "get",
        "/api/activity",
        "List the newest requests; `before` is the id at which the previous page ended",
        "Activity",
        query={"limit": _LARGE_COUNT, "before": _LARGE_COUNT, "status": _LARGE_COUNT, **_FILTERS},
        error_statuses=_ADMIN,
    ),
    Operation(
        "getUsage",
        "get",
        "/api/usage",
        "Sum up the charged tokens by day, account, key and model; `by` is a comma-separated list of these names",
        "UsageReport",
        query={
            "days": COUNT | {"minimum": 1, "maximum": 366},
            "by": STRING,
            "format": {"enum": ["json", "csv"]},
            **dict.fromkeys(("account_id", "key_id", "model"), STRING),
        },
        error_statuses=_ADMIN,
        other_types={"text/csv": "the same rows, if `format` is csv"},
    ),
    Operation(
        "getEvents",
        "get",
        "/api/events",
        "Stream changes of nodes, models and finished requests; `topics` is a comma-separated list of nodes, models, "
        "activity",
        "Event",
        query={"topics": STRING},
        error_statuses=(401, 503),
        media_type="text/event-stream",
    ),
    Operation(
        "getSession",
        "get",
        "/api/session",
        "Return who the request is, or that it needs a key",
        "Session",
        security="public",
    ),
    Operation(
        "signIn",
        "post",
        "/api/session",
        "Start a session for an API key; the response sets the session cookie",
        "Session",
        "SignIn",
        error_statuses=(401, 404, *_BODY),
        security="public",
    ),
    Operation(
        "signOut",
        "delete",
        "/api/session",
        "End the session of the cookie; needs the session's CSRF token",
        "Session",
        error_statuses=(401,),
        security="public",
    ),
    Operation(
        "explain",
        "get",
        "/api/explain",
        "Explain where a request for a model would be sent",
        "Explanation",
        query={"model": NAME, "node": STRING, "without": STRING},
        required=("model",),
        error_statuses=(401,),
    ),
    Operation("listKeys", "get", "/api/keys", "List the keys", "KeyList", error_statuses=_ADMIN, security="admin"),
    Operation("createKey", "post", "/api/keys", "Create a key", "Key", "NewKey", status=201, **_CHANGE),
    Operation("changeKey", "patch", "/api/keys/{key_id}", "Change the terms of a key", "Key", "KeyChange", **_CHANGE),
    Operation("revokeKey", "delete", "/api/keys/{key_id}", "Revoke a key", "Key", **_KEY),
    Operation("getHealth", "get", "/health", "Return the state of the fleet; always 200", "Health", security="public"),
    Operation(
        "getVersion",
        "get",
        "/version",
        "Return the version and git commit of the gateway",
        "Version",
        error_statuses=(401,),
    ),
    Operation(
        "getReadiness",
        "get",
        "/health/ready",
        "Report whether the gateway can serve requests: no shutdown, the ledger is writable, and a node is healthy",
        "Readiness",
        unready=True,
        security="public",
    ),
    Operation(
        "getRoot",
        "get",
        "/",
        "Return the state of the fleet; browsers, which accept HTML, get the console",
        "Health",
        security="public",
        other_types={"text/html": "the console, if the client accepts HTML"},
    ),
    Operation("getDocument", "get", "/openapi.json", "Return this document", "Document", security="public"),
)


@cache
def document() -> dict[str, Any]:
    """Return the whole OpenAPI document. The returned dict is cached, so callers must not change it."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = operation.operation_object()
    return {
        "openapi": "3.1.0",
        "info": {"title": "cortex", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas() | {"Document": {"type": "object", "required": ["openapi", "info", "paths"]}},
            "headers": {"RetryAfter": {"description": "seconds to wait before a retry", "schema": COUNT}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
