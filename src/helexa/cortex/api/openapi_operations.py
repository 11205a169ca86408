"""The operations of the gateway's API, one row for each."""

from dataclasses import dataclass, field
from typing import Any, Literal

from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.openai_completions import CompletionRequest
from helexa.core.wire.responses_request import CompactRequest, ResponsesRequest
from helexa.core.wire.tokens_and_embeddings import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from helexa.cortex.access.keys import KeyChange, NewKey
from helexa.cortex.api import admin_requests as requests
from helexa.cortex.api import openapi_generation_schemas as wire
from helexa.cortex.api import openapi_reply_schemas as replies
from helexa.cortex.lifecycle.explain import Explanation

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}


@dataclass(frozen=True)
class Operation:
    """An operation in the OpenAPI document: one HTTP method of one path.

    `reply`, `body` and `error` are types of bodies. `required` has the names of the required parameters in `query`.
    """

    id: str  # operation id; client generators name functions after it
    route: str  # HTTP method and path template, such as `GET /v1/models/{model}`
    summary: str
    reply: Any
    body: Any = None
    # Error statuses of this operation. The document adds the statuses of all operations, of all operations with a
    # request body, and of the required access.
    errors: tuple[int, ...] = ()
    access: Literal["public", "user", "admin"] = "user"
    query: dict[str, Schema] = field(default_factory=dict[str, Schema])
    required: tuple[str, ...] = ()
    error: type = wire.Error
    status: int = 200
    unready: bool = False  # True if a 503 response has the type `reply` instead of `error`
    streamed: bool = False  # True if the reply can be an event stream
    media_type: str = "application/json"
    # descriptions of other possible bodies of a successful reply, by media type
    other_types: dict[str, str] = field(default_factory=dict[str, str])
    forwards_errors: bool = False  # True if a node's error response is forwarded with its status


def _generation(id: str, path: str, summary: str, reply: type, body: type, **options: Any) -> Operation:
    errors = (404, 422, 429, 502, 503)
    return Operation(id, f"POST {path}", summary, reply, body, errors, forwards_errors=True, **options)


def _tokens(id: str, route: str, summary: str, reply: type, body: type | None = None, **options: Any) -> Operation:
    return Operation(id, route, summary, reply, body, (404, 429, 502, 503), forwards_errors=True, **options)


def _admin(
    id: str, route: str, summary: str, reply: type, body: type | None = None, *errors: int, **options: Any
) -> Operation:
    return Operation(id, route, summary, reply, body, errors, "admin", **options)


_LARGE_COUNT = COUNT | {"maximum": 10**15 - 1}
_WAIT_SECS = {"wait_secs": COUNT | {"maximum": 600}}
_PAGE = {"limit": _LARGE_COUNT, "before": _LARGE_COUNT, "status": _LARGE_COUNT}
_OF_KEYS: dict[str, Schema] = dict.fromkeys(("account_id", "key_id", "model"), STRING)
_ITEMS = {"limit": COUNT | {"minimum": 1, "maximum": 100}, "order": {"enum": ["asc", "desc"]}}
_BY = {"by": {"enum": ["fleet", "node", "model"]}}
_CSV = {"text/csv": "the same rows, if `format` is csv"}

OPERATIONS = (
    _generation(
        "createChatCompletion",
        "/v1/chat/completions",
        "Create a chat completion",
        wire.ChatCompletion,
        ChatRequest,
        streamed=True,
    ),
    _generation(
        "createCompletion",
        "/v1/completions",
        "Create a text completion",
        wire.Completion,
        CompletionRequest,
        streamed=True,
    ),
    _generation(
        "createResponse", "/v1/responses", "Create a response", wire.ResponsesAnswer, ResponsesRequest, streamed=True
    ),
    Operation(
        "getResponse",
        "GET /v1/responses/{response_id}",
        "Return a stored response",
        wire.ResponsesAnswer,
        errors=(404, 502),
    ),
    Operation(
        "deleteResponse",
        "DELETE /v1/responses/{response_id}",
        "Delete a stored response",
        wire.DeletedResponse,
        errors=(404, 502),
    ),
    Operation(
        "listInputItems",
        "GET /v1/responses/{response_id}/input_items",
        "List the input items of a stored response",
        wire.ItemList,
        errors=(404, 502),
        query={**_ITEMS, "after": STRING, "include": STRING},
    ),
    _generation(
        "compactConversation",
        "/v1/responses/compact",
        "Replace a conversation by a summary",
        wire.Compaction,
        CompactRequest,
    ),
    _generation(
        "createMessage",
        "/v1/messages",
        "Create a message (Anthropic's API)",
        wire.Message,
        wire.MessagesRequest,
        streamed=True,
        error=wire.AnthropicError,
    ),
    Operation(
        "countTokens",
        "POST /v1/messages/count_tokens",
        "Count the tokens of a prompt; estimated if the model is not loaded",
        wire.TokenCount,
        wire.CountRequest,
        (404, 429, 503),
        error=wire.AnthropicError,
    ),
    _tokens("tokenize", "POST /tokenize", "Tokenize a text or a conversation", wire.Tokens, TokenizeRequest),
    _tokens("detokenize", "POST /detokenize", "Convert tokens to text", wire.Detokenized, DetokenizeRequest),
    _tokens(
        "countInputTokens",
        "POST /v1/responses/input_tokens",
        "Count the input tokens of a response",
        wire.InputTokens,
        ResponsesRequest,
    ),
    _tokens(
        "getTokenizerInfo",
        "GET /tokenizer_info",
        "Return a model's tokenizer settings",
        wire.TokenizerInfo,
        query={"model": NAME},
    ),
    _generation("createEmbedding", "/v1/embeddings", "Create embeddings", wire.Embeddings, EmbeddingsRequest),
    _generation("createImage", "/v1/images/generations", "Create images", wire.Images, wire.ImageRequest),
    Operation("listModels", "GET /v1/models", "List all models and aliases", replies.ModelList),
    Operation(
        "getModel",
        "GET /v1/models/{model}",
        "Return one model or alias; write slashes in the id as %2F",
        replies.Model,
        errors=(404,),
    ),
    Operation("listNodes", "GET /api/nodes", "List the nodes with their state", replies.NodeList),
    _admin(
        "cordonNode",
        "POST /api/nodes/{name}/cordon",
        "Send no new requests and loads to a node",
        replies.NodeState,
        None,
        404,
    ),
    _admin(
        "uncordonNode",
        "POST /api/nodes/{name}/uncordon",
        "Send requests and loads to a node again",
        replies.NodeState,
        None,
        404,
    ),
    _admin(
        "drainNode",
        "POST /api/nodes/{name}/drain",
        "Cordon a node and wait until its requests have ended",
        replies.NodeState,
        None,
        404,
        query=_WAIT_SECS,
    ),
    _admin(
        "removeNode",
        "DELETE /api/nodes/{name}",
        "Remove a node that joined with an invitation",
        replies.RemovedNode,
        None,
        404,
        409,
    ),
    _admin(
        "createInvitation",
        "POST /api/invitations",
        "Create an invitation for one node",
        replies.Invitation,
        requests.NewInvitation,
        409,
        status=201,
    ),
    Operation(
        "joinNode",
        "POST /api/join",
        "Add the node that sends the request; the token of an invitation authorizes it",
        replies.NewNode,
        requests.NodeJoin,
        (409, 422, 429, 503),
        "public",
        status=201,
    ),
    _admin(
        "loadModel",
        "POST /api/models/load",
        "Load a model, and respond when it is loaded",
        replies.ModelState,
        requests.ModelLoadRequest,
        404,
        409,
        query=_WAIT_SECS,
    ),
    _admin(
        "unloadModel",
        "POST /api/models/unload",
        "Unload a model from a node, or from all nodes, when its requests have ended",
        replies.ModelState,
        requests.ModelUnloadRequest,
        404,
        409,
        502,
    ),
    _admin(
        "clearPrefixCache",
        "DELETE /api/models/{model}/prefix-cache",
        "Clear the prefix cache of a model, in memory and on disk, on one node or on all nodes",
        replies.ClearedPrefixCache,
        None,
        404,
        409,
        502,
        query={"node": STRING},
    ),
    _admin(
        "listLocalModels", "GET /api/models/local", "List the models on the disks of the nodes", replies.LocalModelList
    ),
    _admin(
        "pullModel",
        "POST /api/models/pull",
        "Download a model to a node",
        replies.PullState,
        requests.ModelPullRequest,
        404,
        409,
        502,
        status=202,
        streamed=True,
    ),
    _admin(
        "cancelPull",
        "POST /api/models/pull/cancel",
        "Cancel a download",
        replies.PullState,
        requests.PullCancelRequest,
        404,
        409,
        502,
    ),
    _admin("listPulls", "GET /api/models/pulls", "List the running and the last ended downloads", replies.PullList),
    Operation(
        "listActivity",
        "GET /api/activity",
        "List the newest requests; `before` is the id at which the previous page ended",
        replies.ActivityPage,
        errors=(503,),
        query={**_PAGE, **_OF_KEYS, "node": STRING},
    ),
    Operation(
        "getUsage",
        "GET /api/usage",
        "Sum up charged tokens and their cost; `by` is a comma-separated list of day, hour, account_id, key_id, model",
        replies.UsageReport,
        errors=(503,),
        query={
            "days": COUNT | {"minimum": 1, "maximum": 366},
            "by": STRING,
            "format": {"enum": ["json", "csv"]},
            **_OF_KEYS,
        },
        other_types=_CSV,
    ),
    Operation(
        "getHistory",
        "GET /api/history",
        "Return speed, requests, memory and latency of the last hour",
        replies.History,
        query={**_BY, "limit": COUNT | {"minimum": 1, "maximum": 50}},
    ),
    Operation(
        "getEvents",
        "GET /api/events",
        "Stream changes of nodes and models, finished requests and log lines; `topics` is a comma-separated list of "
        "nodes, models, activity, log",
        replies.Event,
        errors=(503,),
        query={"topics": STRING},
        media_type="text/event-stream",
    ),
    Operation(
        "getSession",
        "GET /api/session",
        "Return the account and the role of the client, or that requests need a key",
        replies.Session,
        access="public",
    ),
    Operation(
        "signIn",
        "POST /api/session",
        "Start a session for an API key or a sign-in link; the response sets the session cookie",
        replies.Session,
        requests.SignIn,
        (401, 404),
        "public",
    ),
    Operation(
        "signOut",
        "DELETE /api/session",
        "End the session of the cookie; needs the session's CSRF token",
        replies.Session,
        None,
        (401,),
        "public",
    ),
    Operation(
        "explain",
        "GET /api/explain",
        "Explain where a request for a model would be sent",
        Explanation,
        query={"model": NAME, "node": STRING, "without": STRING, "for_load": STRING},
        required=("model",),
    ),
    _admin("listKeys", "GET /api/keys", "List the keys", replies.KeyList),
    _admin("createKey", "POST /api/keys", "Create a key", replies.Key, NewKey, 404, 409, status=201),
    _admin("changeKey", "PATCH /api/keys/{key_id}", "Change the limits of a key", replies.Key, KeyChange, 404, 409),
    _admin("revokeKey", "DELETE /api/keys/{key_id}", "Revoke a key", replies.Key, None, 404, 409),
    Operation("getHealth", "GET /health", "Return the state of the fleet; always 200", replies.Health, access="public"),
    Operation("getVersion", "GET /version", "Return the version and git commit of the gateway", replies.Version),
    Operation(
        "getReadiness",
        "GET /health/ready",
        "Report whether the gateway can serve requests: no shutdown, the ledger is writable, and a node is healthy",
        replies.Readiness,
        access="public",
        unready=True,
    ),
    Operation(
        "getRoot",
        "GET /",
        "Return the state of the fleet; browsers, which accept HTML, get the console",
        replies.Health,
        access="public",
        other_types={"text/html": "the console, if the client accepts HTML"},
    ),
    Operation("getDocument", "GET /openapi.json", "Return this document", replies.Document, access="public"),
)
