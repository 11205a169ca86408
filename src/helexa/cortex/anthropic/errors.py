"""Error responses in the format of the Messages API."""

import re
from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.core.sse import frame

MAX_MESSAGE_CHARS = 1000

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STATUSES = {"invalid_request_error": 400, "rate_limit_error": 429, "insufficient_quota": 429}
_HANDLED_BY_CODE = frozenset({"thread_not_found"})
_SIZES = ("prompt_len", "estimated_prompt_tokens", "max")
_LIMIT = re.compile(r"maximum context length (?:is|of) (\d+)")
_PROMPT = re.compile(r"resulted in (\d+)|(\d+) (?:tokens )?(?:from the input|in the messages)|at least (\d+) input")
_COMPLETION = re.compile(r"(\d+) (?:tokens )?(?:for|in) the completion|(\d+) output tokens")


def invalid_anthropic_body(field: str, problem: str) -> ApiError:
    """Return the 400 error for an invalid request body. `field` is the JSON path of the invalid value."""
    return ApiError(400, "invalid_anthropic_body", f"{field}: {problem}", param=field)


def to_anthropic_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return the JSON body of an error response: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

    If the error's code is in `_HANDLED_BY_CODE`, the body also contains the code as `error.details.error_code`.
    Anthropic's client libraries react to this field.
    """
    kind = _TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    details: dict[str, Any] = {"type": kind, "message": _message(error)}
    if error.code in _HANDLED_BY_CODE:
        details["details"] = {"error_code": error.code}
    return {"type": "error", "error": details, "request_id": request_id}


def error_headers(error: ApiError) -> dict[str, str]:
    """Return the HTTP headers of an error response.

    If the token budget of the client's key is exhausted, the headers tell the client not to retry.
    """
    return error.headers() | ({"x-should-retry": "false"} if error.code == "insufficient_quota" else {})


def error_event(error: ApiError, request_id: str | None = None) -> bytes:
    """Return the server-sent event `error`, which ends a stream that failed with `error`."""
    return frame(orjson.dumps(to_anthropic_error(error, request_id)), "error")


def node_error(status: int, body: bytes, retry_after: int | None = None) -> ApiError:
    """Convert a node's error response to an `ApiError`.

    The node's message is used only if the body is in helexa's error format.

    Args:
        status: the node's HTTP status. A status outside the range 400 to 599 becomes 502.
        body: body of the node's response.
        retry_after: seconds of the node's `Retry-After` header, or None.
    """
    try:
        envelope = orjson.loads(body)
    except orjson.JSONDecodeError:
        envelope = None
    error = envelope.get("error") if isinstance(envelope, dict) else None
    status = status if 400 <= status < 600 else 502
    return _from_envelope(status, error, retry_after)


def streamed_error(error: Any) -> ApiError:
    """Convert the error in an event of a node's stream to an `ApiError`.

    Args:
        error: value of the JSON key `error` in the event.
    """
    kind = error.get("type") if isinstance(error, dict) else None
    return _from_envelope(_STATUSES.get(kind, 500) if isinstance(kind, str) else 500, error, None)


def _from_envelope(status: int, error: Any, retry_after: int | None) -> ApiError:
    text = error.get("message") if isinstance(error, dict) else None
    if not isinstance(error, dict) or not isinstance(text, str):
        return _upstream_error(status, retry_after)
    code, kind = error.get("code"), error.get("type")
    if code == "context_length_exceeded" or (status == 400 and _LIMIT.search(text)):
        translated = ApiError(status, "context_length_exceeded", text[:MAX_MESSAGE_CHARS], retry_after=retry_after)
        translated.extras = {name: _count(error, name) for name in _SIZES}
        return translated
    is_helexa_error = isinstance(code, str) or (code is None and "param" in error)
    if not is_helexa_error or not isinstance(kind, str):
        return _upstream_error(status, retry_after)
    return ApiError(status, code, text[:MAX_MESSAGE_CHARS], type=kind, retry_after=retry_after)


def _upstream_error(status: int, retry_after: int | None) -> ApiError:
    return ApiError(status, "upstream_error", f"upstream returned {status}", type="api_error", retry_after=retry_after)


def _message(error: ApiError) -> str:
    """Return the message of an error for clients.

    If the prompt exceeds the context length, the message uses Anthropic's wording. Coding agents recognize this wording
    and then compact the conversation.
    """
    text = str(error)
    if error.code != "context_length_exceeded":
        return text
    limit = _count(error.extras, "max") or _number(_LIMIT, text)
    prompt = _count(error.extras, "prompt_len") or _number(_PROMPT, text)
    if not limit:
        return "prompt is too long"
    if not prompt:
        estimate = _count(error.extras, "estimated_prompt_tokens")
        size = f"about {estimate}" if estimate > limit else f"at least {limit + 1}"
        return f"prompt is too long: {size} tokens > {limit} maximum"
    if prompt > limit:
        return f"prompt is too long: {prompt} tokens > {limit} maximum"
    completion = max(_number(_COMPLETION, text), limit - prompt + 1)
    return f"input length and `max_tokens` exceed context limit: {prompt} + {completion} > {limit}"


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(next((digits for digits in match.groups() if digits), 0)) if match else 0


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    return value if type(value) is int and value > 0 else 0
