"""Reads error responses of nodes in many formats, and the token limits in them.

OpenAI's format of errors is `{"error": {"message", "type", "code", "param"}}`. Other formats are:

* `{"error": "text"}`: Ollama, LM Studio
* `{"object": "error", "message", "type", "code"}`: vLLM, SGLang, Mistral
* `{"detail": "text"}` or `{"detail": [{"loc", "msg"}]}`: FastAPI
* `{"title", "detail", "status"}`: problem details of RFC 9457
* `[{"error": {"message", "status"}}]`: Gemini

For a prompt that exceeds the context length, each server has another error code, or only another text. Clients that
compact conversations react only to the code `context_length_exceeded`, so all these errors get this code.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from helexa.core.errors import ApiError

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
UPSTREAM_ERROR = "upstream_error"

_QUOTA = "insufficient_quota"
_MAX_MESSAGE_CHARS = 1000
_MAX_DEPTH = 4
_MAX_PARTS = 3  # number of messages that are read from a list
_WORD = re.compile(r"[\w.-]{1,64}", re.ASCII)
_TEXT_KEYS = ("message", "msg", "detail", "error", "errors", "title", "status_msg")
_SIZES = ("prompt_len", "estimated_prompt_tokens", "max")
_LLAMACPP_SIZES = {"prompt_len": "n_prompt_tokens", "max": "n_ctx"}
_CONTEXT_TYPES = frozenset({"exceed_context_size_error", "context_window_exceeded", "context_length_error"})
_CONTEXT_STATUSES = frozenset({400, 413, 422, 500})

_NO_MODEL = re.compile(
    r"\bmodel\b.{0,300}\b(?:not (?:found|exist|loaded|available)|unknown|no longer)"
    r"|\b(?:unknown|no such|invalid) model\b",
    re.IGNORECASE | re.DOTALL,
)
_NO_MODEL_NAME = re.compile(
    r"\b(?:unknown|no such|invalid) model (?:name|id)", re.IGNORECASE
)  # LiteLLM's error for an unknown model
_TOO_LONG = re.compile(
    r"(?:maximum|exceed\w*|longer than|too (?:long|large)|only|overflow\w*)\b.{0,120}\bcontext (?:length|window|size)"
    r"|context (?:length|window|size)\b.{0,60}(?:exceed|overflow|\d)"
    r"|prompt (?:is )?too long|maximum model length|input token count|too large for model"
    r"|inputs?` tokens .{0,40}must be",
    re.IGNORECASE | re.DOTALL,
)
_LIMIT = re.compile(
    r"context (?:length|window|size)(?: is| of)?(?: only)?(?: of)? (\d+)|context length \((\d+) tokens\)"
    r"|model with (\d+) maximum context|maximum model length of (\d+)|> (\d+) maximum"
    r"|tokens allowed \((\d+)\)|must be <= (\d+)|n_ctx: (\d+)",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    r"resulted in (\d+)|(\d+) (?:tokens )?(?:from the input|in the messages|in your prompt)|at least (\d+) input"
    r"|passed (\d+) input|prompt \(length (\d+)\)|input \((\d+) tokens\)|Requested tokens \((\d+)\)"
    r"|Prompt contains (\d+)|too long: (\d+)|input token count \((\d+)\)|first (\d+) tokens|has (\d+) input tokens"
    r"|Given: (\d+) `inputs`|n_keep: (\d+)",
    re.IGNORECASE,
)
_LEAST_OUTPUT = 256  # If fewer output tokens fit, an error is better: it lets clients shorten the conversation.
_LEAST_PROMPT = re.compile(r"at least \d+ input")
_MOST_OUTPUT = re.compile(
    r"at most (\d+) (?:completion|output) tokens|valid range of max_tokens is \[\d+, ?(\d+)\]"
    r"|`max_tokens` must be less than or equal to `(\d+)`|> (\d+), which is the maximum allowed number of output"
    r"|max(?:_completion|_output)?_tokens\b.{0,80}expected a value <= (\d+)",
    re.IGNORECASE,
)


def read_error(status: int, body: bytes, retry_after: int | None = None) -> ApiError:
    """Return a node's error response as an `ApiError`.

    If the body contains no text in a known format, the message is "upstream returned STATUS".

    Args:
        status: the node's HTTP status. A status outside the range 400 to 599 becomes 502.
        retry_after: seconds of the node's `Retry-After` header; None if there is no such header.
    """
    return read_error_value(status if 400 <= status < 600 else 502, _parse(body), retry_after)


def read_error_value(status: int, content: Any, retry_after: int | None = None) -> ApiError:
    """Return the error in a parsed body, or in an event of a stream, as `ApiError`.

    Args:
        status: HTTP status of the `ApiError`, except for an error about the context length, which always gets 400.
        content: the JSON value. `{"error": ...}` is one of the known formats.
        retry_after: seconds until a retry may succeed; None if unknown.
    """
    text = _text(content)
    if text is None:
        message = f"upstream returned {status}"
        return ApiError(status, UPSTREAM_ERROR, message, type="api_error", retry_after=retry_after)
    fields = _fields(content)
    code, kind = _word(fields.get("code")), _word(fields.get("type"))
    if code == CONTEXT_LENGTH_EXCEEDED or kind in _CONTEXT_TYPES or _is_too_long(status, text):
        sizes = {name: _size(fields, name) for name in _SIZES}
        sizes["max"] = sizes["max"] or _number(_LIMIT, text)
        sizes["prompt_len"] = sizes["prompt_len"] or _number(_PROMPT, text)
        error = ApiError(400, CONTEXT_LENGTH_EXCEEDED, text, param="messages", retry_after=retry_after)
        error.extras = {name: size for name, size in sizes.items() if size}
        return error
    kind = kind or ("api_error" if status >= 500 else "invalid_request_error")
    param = fields.get("param")
    return ApiError(
        status, code, text, type=kind, param=param if isinstance(param, str) else None, retry_after=retry_after
    )


def for_client(error: ApiError, node: str) -> ApiError:
    """Return the error that a client gets for the error response `error` of a node.

    If the node rejects the gateway's own credentials or account, the error is not the client's. It becomes a 502 that
    names the node, without the node's text, which may quote a key. Other errors are returned unchanged.
    """
    if error.status in (401, 403, 407):
        message = (
            f"node '{node}' rejects the gateway's API key or access: it answered HTTP {error.status}; "
            "an administrator must correct the key of this node"
        )
        return ApiError(502, "upstream_auth_error", message, type="api_error")
    if error.status == 402 or _QUOTA in (error.code, error.type):
        message = (
            f"node '{node}' answered HTTP {error.status}: the gateway's account at this node has no quota left; "
            "use another model, or let an administrator add quota"
        )
        return ApiError(502, "upstream_quota_exceeded", message, type="api_error")
    return error


def says_model_is_gone(error: ApiError) -> bool:
    """Return whether an error says that the node does not have the model."""
    if error.code == "model_not_found":
        return True
    text = str(error)
    return (error.status == 404 and _NO_MODEL.search(text) is not None) or (
        error.status == 400 and _NO_MODEL_NAME.search(text) is not None
    )


def has_openai_format(body: bytes, error: ApiError) -> bool:
    """Return whether a node's error response can be forwarded to clients unchanged.

    Args:
        error: the result of `read_error` for the body.
    """
    content = _parse(body)
    value = content.get("error") if isinstance(content, dict) else None
    if not isinstance(value, dict) or not isinstance(value.get("message"), str):
        return False
    if any(not isinstance(value.get(name), str | None) for name in ("code", "type", "param")):
        return False
    return error.code != CONTEXT_LENGTH_EXCEEDED or value.get("code") == CONTEXT_LENGTH_EXCEEDED


def context_limit(error: ApiError) -> int:
    """Return the context length that a `context_length_exceeded` error states, or 0."""
    return _size(error.extras, "max") or _number(_LIMIT, str(error))


def context_prompt(error: ApiError) -> int:
    """Return the prompt length that a `context_length_exceeded` error states, or 0."""
    return _size(error.extras, "prompt_len") or _number(_PROMPT, str(error))


def most_output(error: ApiError) -> int:
    """Return the model's maximum of output tokens that an error states, or 0.

    A maximum below `_LEAST_OUTPUT` counts as not stated.
    """
    most = _number(_MOST_OUTPUT, str(error))
    return most if most >= _LEAST_OUTPUT else 0


def output_beside_prompt(error: ApiError, limit: int) -> int:
    """Return how many output tokens fit beside the prompt, according to the error.

    The result is 0 if the number is unknown, is less than `_LEAST_OUTPUT`, or is not less than `limit`, the output
    limit of the rejected request.
    """
    prompt = 0 if has_uncounted_prompt(error) else context_prompt(error)
    most = context_limit(error) - prompt if prompt else 0
    return most if _LEAST_OUTPUT <= most < limit else 0


def has_uncounted_prompt(error: ApiError) -> bool:
    """Return whether vLLM stopped counting a prompt when it became too long.

    vLLM stops counting where the prompt and the output limit together exceed the context.
    """
    return _LEAST_PROMPT.search(str(error)) is not None


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _text(value: Any, depth: int = 0) -> str | None:
    """Return the first text under a key of `_TEXT_KEYS` as one line; None without one."""
    if isinstance(value, str) and depth > 0:
        return " ".join(value.split())[:_MAX_MESSAGE_CHARS] or None
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, list):
        items = value[:_MAX_PARTS] if depth > 0 else [item for item in value[:_MAX_PARTS] if isinstance(item, dict)]
        parts = [text for item in items if (text := _text(item, depth + 1))]
        return "; ".join(parts)[:_MAX_MESSAGE_CHARS] or None
    if isinstance(value, dict):
        text = next((text for key in _TEXT_KEYS if (text := _text(value.get(key), depth + 1))), None)
        place = value.get("loc")
        if text and isinstance(place, list):
            text = f"{'.'.join(str(part) for part in place[:8])}: {text}"
        return text
    return None


def _fields(content: Any) -> Mapping[str, Any]:
    """Return the JSON object with the fields of the error."""
    if isinstance(content, list):
        content = content[0] if content else None
    if not isinstance(content, dict):
        return {}
    error = content.get("error")
    return error if isinstance(error, dict) else content


def _is_too_long(status: int, text: str) -> bool:
    if status not in _CONTEXT_STATUSES or _TOO_LONG.search(text) is None:
        return False
    return status < 500 or _number(_LIMIT, text) > 0


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and _WORD.fullmatch(value) and not value.isdigit() else None


def _size(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name) or fields.get(_LLAMACPP_SIZES.get(name, name))
    return value if type(value) is int and value > 0 else 0


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(next((digits for digits in match.groups() if digits), 0)) if match else 0
