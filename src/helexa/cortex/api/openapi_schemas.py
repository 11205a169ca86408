"""JSON schemas of request and response bodies. They are derived from Python classes, or written by hand below."""

from typing import Any

from pydantic import TypeAdapter

from helexa.core.fleet import Activation, Cost, DeviceHealth, Discovery, Limit, ModelInfo, ModelLoad
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.openai_completions import CompletionRequest
from helexa.core.wire.openai_embeddings import EmbeddingsRequest
from helexa.core.wire.responses.compaction import CompactRequest
from helexa.core.wire.responses.request import ResponsesRequest
from helexa.core.wire.tokenize import DetokenizeRequest, TokenizeRequest
from helexa.cortex.access.key_terms import KeyChange, NewKey
from helexa.cortex.access.principal import Principal
from helexa.cortex.api.admin_requests import ModelLoadRequest, ModelUnloadRequest, SignIn
from helexa.cortex.ledger.activity import Activity

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}

_FOLDER = "#/components/schemas/"
_GENERATION = (ChatRequest, CompletionRequest, ResponsesRequest, CompactRequest, EmbeddingsRequest)
_TOKENS = (TokenizeRequest, DetokenizeRequest)  # `model` is optional
_ADMIN_REQUESTS = (KeyChange, NewKey, ModelLoadRequest, ModelUnloadRequest, SignIn)
_REQUESTS = (*_GENERATION, *_TOKENS, *_ADMIN_REQUESTS)
_RESPONSES = (Activation, Activity, Cost, DeviceHealth, Discovery, Limit, ModelInfo, ModelLoad, Principal)


def ref(name: str) -> Schema:
    """Return a JSON schema that refers to the schema `name` under `components` of the OpenAPI document."""
    return {"$ref": _FOLDER + name}


def either(*types: Schema) -> Schema:
    """Return a schema that accepts any value that one of the schemas `types` accepts."""
    return {"anyOf": list(types)}


def or_null(schema: Schema) -> Schema:
    """Return a schema that accepts null and all values that `schema` accepts."""
    return either(schema, {"type": "null"})


def array(items: Schema, **limits: int) -> Schema:
    """Return the schema of a list of elements with the schema `items`. `limits` are keywords such as `maxItems`."""
    return {"type": "array", "items": items, **limits}


def record(required: dict[str, Schema], **optional: Schema) -> Schema:
    """Return the schema of an object with the given required and optional members. Other members are allowed too."""
    return {"type": "object", "properties": required | optional, "required": list(required)}


def one_of(*values: str) -> Schema:
    """Return the schema of a string that must be one of `values`."""
    return {"type": "string", "enum": list(values)}


def schemas() -> dict[str, Schema]:
    """Return the schemas under `components` of the OpenAPI document, by name."""
    inputs = [(schema_type.__name__, "validation", TypeAdapter[Any](schema_type)) for schema_type in _REQUESTS]
    inputs += [(schema_type.__name__, "serialization", TypeAdapter[Any](schema_type)) for schema_type in _RESPONSES]
    _, derived = TypeAdapter.json_schemas(inputs, ref_template=_FOLDER + "{model}")  # pyright: ignore[reportArgumentType]
    definitions = {name: _terse(schema) for name, schema in derived["$defs"].items()}
    for request in (*_GENERATION, *_TOKENS):
        schema = definitions[request.__name__]
        schema["properties"]["model"] = NAME | {"description": "A model id or an alias."}
        if request in _GENERATION:
            schema["required"] = [*schema.get("required", ()), "model"]
    key, row = definitions.pop("Principal")["properties"], definitions.pop("Activity")["properties"]
    return definitions | _HANDWRITTEN | {"Key": _key(key), "Request": record({"id": INTEGER, **row})}


def _terse(schema: Any) -> Any:
    """Return a copy of a schema without titles, and with only the first paragraph of each description.

    Titles are removed because they only repeat the names of classes and fields.
    """
    if isinstance(schema, list):
        return [_terse(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shortened = {name: _terse(value) for name, value in schema.items() if name != "title" or not isinstance(value, str)}
    if isinstance(text := shortened.get("description"), str):
        shortened["description"] = text.partition("\n\n")[0]
    return shortened


def _key(terms: dict[str, Schema]) -> Schema:
    return record(
        terms
        | {"source": one_of("config", "database"), "hint": or_null(STRING), "created_at": or_null(NUMBER)}
        | {"revoked_at": or_null(NUMBER), "spent": COUNT, "held": COUNT, "window_ends_at": or_null(NUMBER)},
        key=STRING | {"description": "The key's secret, only in the response that creates the key."},
    )


_ERROR = record({"message": STRING, "type": STRING}, code=or_null(STRING), param=or_null(STRING))
_USAGE = record(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    prompt_tokens_details=record({}, cached_tokens=COUNT),
    completion_tokens_details=record({}, reasoning_tokens=COUNT),
)
_CHOICE = {"index": COUNT, "finish_reason": or_null(STRING)}
_BLOCKS = either(STRING, array(record({"type": STRING})))
_TURN = record({"role": one_of("user", "assistant", "system"), "content": _BLOCKS})
_PROMPT = {"model": NAME, "messages": array(_TURN, minItems=1)}
_TOOL = record({"name": NAME}, description=STRING, input_schema={"type": "object"})
_TOOL_CHOICE = record({"type": one_of("auto", "any", "tool", "none")}, name=NAME)
_PROMPT_OPTIONS = {"system": _BLOCKS, "tools": array(_TOOL), "tool_choice": _TOOL_CHOICE}

_HANDWRITTEN: dict[str, Schema] = {
    "Error": record({"error": _ERROR}),
    "AnthropicError": record(
        {
            "type": one_of("error"),
            "error": record({"type": STRING, "message": STRING}),
            "request_id": or_null(STRING),
        }
    ),
    "Usage": _USAGE,
    "ChatCompletion": record(
        {
            "id": STRING,
            "object": one_of("chat.completion"),
            "model": STRING,
            "choices": array(record({"message": record({"role": STRING})}, **_CHOICE)),
        },
        created=INTEGER,
        usage=ref("Usage"),
    ),
    "Completion": record(
        {
            "id": STRING,
            "object": one_of("text_completion"),
            "model": STRING,
            "choices": array(record({"text": STRING}, **_CHOICE)),
        },
        created=INTEGER,
        usage=ref("Usage"),
    ),
    "ResponsesAnswer": record({"id": STRING, "object": one_of("response"), "output": array({"type": "object"})}),
    "Compaction": record(
        {"id": STRING, "object": one_of("response.compaction"), "output": array({"type": "object"})},
        created_at=INTEGER,
        usage=record({"input_tokens": COUNT, "output_tokens": COUNT}),
    ),
    "ItemList": record(
        {"object": one_of("list"), "data": array({"type": "object"}), "has_more": BOOLEAN},
        first_id=or_null(STRING),
        last_id=or_null(STRING),
    ),
    "DeletedResponse": record({"id": STRING, "object": one_of("response"), "deleted": BOOLEAN}),
    "Embeddings": record(
        {"object": one_of("list"), "data": array(record({"index": COUNT, "embedding": either(array(NUMBER), STRING)}))}
    ),
    "ImageRequest": record({"model": NAME, "prompt": STRING}, n=or_null(INTEGER), size=or_null(STRING)),
    "Images": record({"data": array(record({}, url=STRING, b64_json=STRING))}, created=INTEGER),
    "MessagesRequest": record(
        _PROMPT | {"max_tokens": INTEGER | {"minimum": 1}},
        **_PROMPT_OPTIONS,
        stream=or_null(BOOLEAN),
        stop_sequences=array(NAME),
        temperature=NUMBER,
    ),
    "CountRequest": record(_PROMPT, **_PROMPT_OPTIONS),
    "Message": record(
        {
            "id": STRING,
            "type": one_of("message"),
            "role": one_of("assistant"),
            "model": STRING,
            "content": array(record({"type": one_of("text", "thinking", "tool_use")})),
            "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"),
            "stop_sequence": or_null(STRING),
            "usage": record({"input_tokens": COUNT, "output_tokens": COUNT}, cache_read_input_tokens=COUNT),
        }
    ),
    "Tokens": record({"count": COUNT, "max_model_len": COUNT, "tokens": array(COUNT)}),
    "Detokenized": record({"prompt": STRING}),
    "TokenizerInfo": record({}, bos_token=or_null(STRING), eos_token=or_null(STRING), chat_template=or_null(STRING)),
    "InputTokens": record({"object": one_of("response.input_tokens"), "input_tokens": COUNT}),
    "TokenCount": record({"input_tokens": COUNT}),
    "Model": record(
        {
            "id": STRING,
            "object": one_of("model"),
            "created": INTEGER,
            "owned_by": STRING,
            "loaded": BOOLEAN,
            "state": one_of("warm", "loading", "recovering", "cold"),
            "feasible_on": array(STRING),
            "locations": array(record({"node": STRING, "status": STRING, "vram_estimate_mb": or_null(INTEGER)})),
            "capabilities": array(STRING),
            "tool_call": BOOLEAN,
            "reasoning": BOOLEAN,
        },
        progress=record({}, fraction=NUMBER, stage=STRING, eta_secs=NUMBER),
        cost=ref("Cost"),
        limit=ref("Limit"),
        max_model_len=INTEGER,
        max_input_tokens=INTEGER,
        max_output_tokens=INTEGER,
    ),
    "ModelList": record({"object": one_of("list"), "data": array(ref("Model"))}),
    "Health": record(
        {
            "status": one_of("ok", "impaired", "degraded"),
            "nodes": record({"healthy": COUNT, "total": COUNT}),
        },
        unservable=array(record({"node": STRING, "model": STRING}, reason=STRING, detail=STRING)),
    ),
    "Readiness": record(
        {
            "ready": BOOLEAN,
            "components": record(
                {name: record({"ready": BOOLEAN}, reason=STRING) for name in ("gateway", "ledger", "nodes")}
            ),
        }
    ),
    "Version": record(
        {
            "package_version": STRING,
            "git_sha": STRING,
            "git_sha_long": STRING,
            "git_dirty": or_null(BOOLEAN),
            "build_timestamp": or_null(STRING),
        }
    ),
    "Node": record(
        {
            "name": STRING,
            "endpoint": STRING,
            "kind": one_of("neuron", "openai"),
            "healthy": BOOLEAN,
            "cordoned": BOOLEAN,
            "misses": COUNT,
            "problem": or_null(STRING),
            "models": array(ref("ModelInfo")),
            "in_flight": {"type": "object", "additionalProperties": COUNT},
            "loading": array(STRING),
            "draining": array(STRING),
            "failing": array(STRING),
            "loads": array(ref("LoadProgress")),
            "failures": array(ref("LoadFailure")),
        },
        discovery=ref("Discovery"),
        activation=ref("Activation"),
        devices=array(ref("DeviceHealth")),
        load=array(ref("ModelLoad")),
        memory_free_mb=INTEGER,
        memory_total_mb=INTEGER,
        poisoned=array(record({"model_id": STRING, "error": STRING})),
    ),
    "NodeList": record({"nodes": array(ref("Node"))}),
    "NodeState": record({"name": STRING, "cordoned": BOOLEAN, "in_flight": COUNT, "loading": COUNT}),
    "ModelState": record({"model": STRING, "node": STRING, "status": one_of("loaded", "unloaded")}),
    "UsageReport": record({"days": COUNT, "usage": array(ref("UsageRow"))}),
    "UsageRow": record(
        dict.fromkeys(("requests", "prompt", "completion", "cached", "charged", "estimated"), COUNT),
        day=STRING | {"format": "date"},
        account_id=STRING,
        key_id=STRING,
        model=STRING,
    ),
    "Event": STRING | {"description": "server-sent events: `names`, `node`, `models`, `request`, `dropped` and `end`"},
    "Session": record(
        {
            "signed_in": BOOLEAN,
            "require_auth": BOOLEAN,
            "account_id": or_null(STRING),
            "key_id": or_null(STRING),
            "role": or_null(one_of("user", "admin")),
            "reason": or_null(STRING),
            "providers": array(STRING),
            "bench_url": or_null(STRING),
        },
        csrf=STRING | {"description": "value for the header `x-helexa-csrf`, only for a request with a cookie"},
        expires_at=NUMBER,
    ),
    "LoadProgress": record({"model": STRING}, fraction=NUMBER, stage=STRING, eta_secs=NUMBER),
    "LoadFailure": record(
        {"model": STRING, "message": STRING, "temporary": BOOLEAN, "times": COUNT, "retry_at": COUNT}
    ),
    "KeyList": record({"keys": array(ref("Key"))}),
    "Activity": record({"requests": array(ref("Request"))}),
    "Explanation": record(
        {
            "model": STRING,
            "decision": one_of("warm", "load", "wait", "refuse"),
            "node": or_null(STRING),
            "reason": STRING,
            "evict": array(STRING),
            "retry_after": or_null(INTEGER),
            "candidates": array(record({"node": STRING, "warm": BOOLEAN, "verdict": STRING})),
        }
    ),
}
