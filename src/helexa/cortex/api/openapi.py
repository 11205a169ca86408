"""The gateway's API as an OpenAPI 3.1 document."""

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from helexa.core.version import __version__
from helexa.cortex.api.openapi_schemas import COUNT, NAME, STRING, Schema, ref, schemas

_STATUS_TEXTS = {
    400: "the request is malformed, or a field is missing or wrong",
    401: "no key, or not a good one",
    403: "not with this key; or a web page, or a host's name, that may not",
    404: "there is no such thing here",
    408: "the body stopped arriving",
    409: "it is there already, or cannot be changed",
    413: "the body is too large",
    415: "the body is compressed",
    422: "the model's chat template rejects the messages",
    429: "a limit or the budget of this key is used up",
    431: "the head is too large",
    500: "a fault of ours",
    502: "the node did not answer, or broke off",
    503: "nothing can serve this now",
}
_RETRIED = (429, 503)
_EVERYWHERE = (400, 403, 431, 500)
_BODY = (408, 413, 415)
_GENERATION = (401, 404, *_BODY, 422, 429, 502, 503)
_ADMIN = (401, 503)

_DESCRIPTION = """\
One address for all models of a fleet, in the dialects of OpenAI and of Anthropic.

A key is needed where `entitlements.require_auth` says so, and always where keys and nodes are changed. What cannot be
read as HTTP, or comes from a web page that may not ask, is refused in OpenAI's envelope on every path."""


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Attributes:
        id: operation id, which client generators use as a name.
        method: HTTP method in lower case.
        path: path template.
        summary: short description.
        response: schema of the response with `status`.
        body: schema of the request body, or None.
        query: schemas of the query parameters; parameters in `required` are required.
        required: names of the required query parameters.
        error_statuses: error statuses in addition to those of every operation.
        error: schema of error responses.
        status: status of a successful response.
        unready: True if the operation can answer 503 with the schema `response`.
        streamed: True if the operation can answer with events.
        forwards_errors: True if a node's error responses are passed on with any status.
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
    forwards_errors: bool = False
    security: str = "user"

    def described(self) -> dict[str, Any]:
        """Return the operation object of the document."""
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
        content: dict[str, Any] = {"application/json": {"schema": ref(self.response)}}
        if self.streamed:
            content["text/event-stream"] = {"schema": {"description": "events of the dialect, if `stream` is true"}}
        responses: dict[str, Any] = {str(self.status): {"description": "as asked", "content": content}}
        error_content = {"application/json": {"schema": ref(self.error)}}
        for status in sorted({*_EVERYWHERE, *self.error_statuses}):
            responses[str(status)] = {"description": _STATUS_TEXTS[status], "content": error_content}
            if status in _RETRIED:
                responses[str(status)]["headers"] = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}}
        if self.unready:
            responses["503"] = {"description": "a component fails", "content": content}
        if self.forwards_errors:
            responses["default"] = {"description": "a node's refusal", "content": error_content}
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

OPERATIONS = (
    _generation(
        "createChatCompletion",
        "/v1/chat/completions",
        "Go on with a conversation",
        "ChatRequest",
        "ChatCompletion",
        streamed=True,
    ),
    _generation(
        "createCompletion", "/v1/completions", "Go on with a text", "CompletionRequest", "Completion", streamed=True
    ),
    _generation(
        "createResponse",
        "/v1/responses",
        "Go on with a conversation, in the dialect of Responses",
        "ResponsesRequest",
        "ResponsesAnswer",
        streamed=True,
    ),
    Operation(
        "getResponse",
        "get",
        "/v1/responses/{response_id}",
        "A response that is kept",
        "ResponsesAnswer",
        error_statuses=(401, 404, 502),
    ),
    Operation(
        "deleteResponse",
        "delete",
        "/v1/responses/{response_id}",
        "Forget a response",
        "DeletedResponse",
        error_statuses=(401, 404, 502),
    ),
    Operation(
        "listInputItems",
        "get",
        "/v1/responses/{response_id}/input_items",
        "The items that a response answered",
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
        "A summary that stands for a conversation",
        "CompactRequest",
        "Compaction",
    ),
    _generation(
        "createMessage",
        "/v1/messages",
        "Go on with a conversation, in Anthropic's dialect",
        "MessagesRequest",
        "Message",
        streamed=True,
        error="AnthropicError",
    ),
    Operation(
        "countTokens",
        "post",
        "/v1/messages/count_tokens",
        "How long a prompt is; estimated where its model is not warm",
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
            ("tokenize", "/tokenize", "The tokens of a text or a conversation", "Tokens", "TokenizeRequest"),
            ("detokenize", "/detokenize", "The text of tokens", "Detokenized", "DetokenizeRequest"),
            (
                "countInputTokens",
                "/v1/responses/input_tokens",
                "How long the prompt of a response is",
                "InputTokens",
                "ResponsesRequest",
            ),
        )
    ),
    Operation(
        "getTokenizerInfo",
        "get",
        "/tokenizer_info",
        "What a model's files say about its tokenizer",
        "TokenizerInfo",
        query={"model": NAME},
        error_statuses=(401, 404, 429, 502, 503),
        forwards_errors=True,
    ),
    _generation("createEmbedding", "/v1/embeddings", "Texts as vectors", "EmbeddingsRequest", "Embeddings"),
    _generation("createImage", "/v1/images/generations", "Images of a text", "ImageRequest", "Images"),
    Operation("listModels", "get", "/v1/models", "All models and aliases", "ModelList", error_statuses=(401,)),
    Operation(
        "getModel", "get", "/v1/models/{model}", "One of them; slashes as %2F", "Model", error_statuses=(401, 404)
    ),
    Operation("listNodes", "get", "/api/nodes", "What is known of every node", "NodeList", error_statuses=(401,)),
    Operation("cordonNode", "post", "/api/nodes/{name}/cordon", "Give a node nothing new", "NodeState", **_NODE),
    Operation(
        "uncordonNode", "post", "/api/nodes/{name}/uncordon", "Give it requests and loads again", "NodeState", **_NODE
    ),
    Operation(
        "drainNode",
        "post",
        "/api/nodes/{name}/drain",
        "Cordon it, and wait until nothing runs there",
        "NodeState",
        query={"wait_secs": COUNT | {"maximum": 600}},
        **_NODE,
    ),
    Operation(
        "listActivity",
        "get",
        "/api/activity",
        "The newest requests; `before` is an id, for the next page",
        "Activity",
        query={"limit": _LARGE_COUNT, "before": _LARGE_COUNT, "status": _LARGE_COUNT, **_FILTERS},
        error_statuses=_ADMIN,
    ),
    Operation(
        "explain",
        "get",
        "/api/explain",
        "Where a request would go now, and why",
        "Explanation",
        query={"model": NAME},
        required=("model",),
        error_statuses=(401,),
    ),
    Operation("listKeys", "get", "/api/keys", "All keys", "KeyList", error_statuses=_ADMIN, security="admin"),
    Operation("createKey", "post", "/api/keys", "A new key", "Key", "NewKey", status=201, **_CHANGE),
    Operation("changeKey", "patch", "/api/keys/{key_id}", "Other terms for a key", "Key", "KeyChange", **_CHANGE),
    Operation("revokeKey", "delete", "/api/keys/{key_id}", "The end of a key", "Key", **_KEY),
    Operation("getHealth", "get", "/health", "The state of the fleet; 200 while it lives", "Health", security="public"),
    Operation(
        "getReadiness",
        "get",
        "/health/ready",
        "Whether requests can be served now: the ledger can be written, and a node is healthy",
        "Readiness",
        unready=True,
        security="public",
    ),
    Operation("getRoot", "get", "/", "The same", "Health", security="public"),
    Operation("getDocument", "get", "/openapi.json", "This document", "Document", security="public"),
)


@cache
def document() -> dict[str, Any]:
    """Return the whole document; callers must not change it."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = operation.described()
    return {
        "openapi": "3.1.0",
        "info": {"title": "cortex", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas() | {"Document": {"type": "object", "required": ["openapi", "info", "paths"]}},
            "headers": {"RetryAfter": {"description": "seconds after which a retry may help", "schema": COUNT}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
