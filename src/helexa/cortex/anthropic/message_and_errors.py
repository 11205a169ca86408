"""Messages and error responses of the Messages API, from chat completions."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from helexa.core.errors import ApiError, malformed_json
from helexa.core.sse import frame
from helexa.core.wire.request import without_lone_surrogates
from helexa.cortex.forwarding.translated_reply import call_as_text, first_choice, reasoning
from helexa.cortex.upstream.error_responses import CONTEXT_LENGTH_EXCEEDED, context_limit, context_prompt
from helexa.cortex.upstream.response_body import as_json, malformed, parse_arguments
from helexa.cortex.upstream.usage_meter import BYTES_PER_TOKEN

VERSION_HEADER = "anthropic-version"  # a request with this header gets responses in Anthropic's formats

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
_HANDLED_BY_CODE = frozenset({"thread_not_found"})
_COMPLETION = re.compile(r"(\d+) (?:tokens )?(?:for|in) the completion|(\d+) output tokens")

_NOTHING_CREATED = {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0}
_REASON_CHARS = 64
_COMPLETE = ("stop", "tool_calls", "function_call")
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


def invalid_anthropic_body(field: str, problem: str) -> ApiError:
    """Return the Messages API's 400 error for an invalid value at JSON path `field`."""
    return ApiError(400, "invalid_anthropic_body", f"{field}: {problem}", param=field)


def shown(value: object) -> str:
    """Return a text for error messages: a string in quotes, or the type of `value`."""
    return repr(value[:_REASON_CHARS]) if isinstance(value, str) else f"a value of type {type(value).__name__}"


def to_anthropic_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return the JSON body of an error response of the Messages API."""
    kind = _TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    details: dict[str, Any] = {"type": kind, "message": _message(error)}
    # For these codes, Anthropic's client libraries read `error_code` and react to it.
    if error.code in _HANDLED_BY_CODE:
        details["details"] = {"error_code": error.code}
    return {"type": "error", "error": details, "request_id": request_id}


def error_headers(error: ApiError) -> dict[str, str]:
    """Return the HTTP headers of an error response of the Messages API."""
    # Anthropic's clients retry a request several times after status 429. With an exhausted budget, retries are useless.
    return error.headers() | ({"x-should-retry": "false"} if error.code == "insufficient_quota" else {})


def error_event(error: ApiError, request_id: str | None = None) -> bytes:
    """Return the event that ends a Messages API stream that failed with `error`."""
    return frame(orjson.dumps(to_anthropic_error(error, request_id)), "error")


def _message(error: ApiError) -> str:
    """Return an error's message in the wording that Anthropic's clients recognize."""
    text = str(error)
    if error.code != CONTEXT_LENGTH_EXCEEDED:
        return text
    limit, prompt = context_limit(error), context_prompt(error)
    # Coding agents recognize Anthropic's wording of these messages, and then compact the conversation.
    if not limit:
        return "prompt is too long"
    if not prompt:
        estimate = error.extras.get("estimated_prompt_tokens")
        is_over = isinstance(estimate, int) and estimate > limit
        size = f"about {estimate}" if is_over else f"at least {limit + 1}"
        return f"prompt is too long: {size} tokens > {limit} maximum"
    if prompt > limit:
        return f"prompt is too long: {prompt} tokens > {limit} maximum"
    # The prompt alone fits into the context, but prompt and output limit together do not.
    match = _COMPLETION.search(text)
    stated = int(next(digits for digits in match.groups() if digits)) if match else 0
    completion = max(stated, limit - prompt + 1)
    return f"input length and `max_tokens` exceed context limit: {prompt} + {completion} > {limit}"


def read_object(body: bytes) -> dict[str, Any]:
    """Parse the body of a Messages API request, and return the JSON object.

    Raises:
        ApiError: 400 because the body is not JSON (`malformed_json`) or not an object (`invalid_anthropic_body`).
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if (repaired := without_lone_surrogates(body)) != body:
            return read_object(repaired)
        raise malformed_json(str(error)) from None
    if not isinstance(value, dict):
        raise invalid_anthropic_body("body", "must be a JSON object")
    return value


def to_json(value: dict[str, Any]) -> bytes:
    """Serialize a JSON object of a Messages API request.

    Raises:
        ApiError: 400 `invalid_anthropic_body` if the object is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise invalid_anthropic_body("body", str(error)) from None


def anthropic_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the usage of a chat completion to the usage of a `message_delta` event."""
    prompt = _count(usage.get("prompt_tokens"))
    cached = min(_count(_member(usage.get("prompt_tokens_details"), "cached_tokens")), prompt)
    # In Anthropic's format, `input_tokens` does not include the cached tokens.
    counts: dict[str, Any] = {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": _count(usage.get("completion_tokens")),
    }
    if reasoning := _count(_member(usage.get("completion_tokens_details"), "reasoning_tokens")):
        counts["output_tokens_details"] = {"thinking_tokens": reasoning}
    # Helexa's own nodes add `helexa_timing` and `helexa_cache_miss` to the usage.
    timing = usage.get("helexa_timing")
    if isinstance(timing, dict):
        counts["helexa_timing"] = {name: value for name, value in timing.items() if type(value) in (int, float)}
    if isinstance(miss := usage.get("helexa_cache_miss"), dict):
        counts["helexa_cache_miss"] = {name: value for name, value in miss.items() if type(value) in (int, str)}
    return counts


def message_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the usage of a chat completion to the usage of a Messages API message."""
    counts = anthropic_usage(usage)
    counts["cache_creation"] = _NOTHING_CREATED
    counts["service_tier"] = "standard"
    return counts


def with_estimates(usage: Mapping[str, Any], prompt: int, completion: int) -> Mapping[str, Any]:
    """Return a chat completion's usage with estimates for missing counts."""
    # Third-party backends may report no counts, or 0. Clients decide by these counts when to compact the conversation.
    estimates = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**usage, **{name: count for name, count in estimates.items() if not _count(usage.get(name))}}


def prompt_usage(counts: Any) -> dict[str, Any] | None:
    """Convert a node's field `helexa_prompt` to a chat completion's usage.

    Return None if `counts` is not an object.
    """
    if not isinstance(counts, dict):
        return None
    details = {"cached_tokens": counts.get("cached_tokens")}
    return {"prompt_tokens": counts.get("prompt_tokens"), "prompt_tokens_details": details}


def stop_reason(
    finish_reason: Any, matched: Any, *, called: bool, stop_sequences: Sequence[str]
) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a Messages API message.

    Args:
        matched: the field `stop_reason` of the chat completion's choice, in which some nodes report the stop sequence
            that ended the output.
        called: True if the message calls a tool.

    Raises:
        ApiError: 502 `upstream_malformed_response`: the finish reason is unknown, so the answer may be incomplete.
    """
    if isinstance(finish_reason, str) and finish_reason in _STOP_REASONS:
        return _STOP_REASONS[finish_reason], None
    if finish_reason is not None and finish_reason not in _COMPLETE:
        raise malformed(f"the finish reason '{str(finish_reason)[:_REASON_CHARS]}' is unknown")
    if called:  # some nodes report "stop" for tool calls
        return "tool_use", None
    if isinstance(matched, str) and matched in stop_sequences:
        return "stop_sequence", matched
    return "end_turn", None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


# Placeholder for Anthropic's signature of thinking. Some clients treat thinking without a signature as text.
SIGNATURE = "unsigned"


def to_message(
    chat: Mapping[str, Any],
    model: str,
    *,
    message_id: str,
    input_tokens: int = 0,
    stop_sequences: Sequence[str] = (),
) -> dict[str, Any]:
    """Translate a chat completion to a Messages API message.

    Args:
        model: model name in the client's request, possibly an alias.
        input_tokens: estimated number of prompt tokens, for a chat completion without token counts.

    Raises:
        ApiError: 502 `upstream_malformed_response`: the chat completion is malformed.
    """
    choice = first_choice(chat)
    message = None if choice is None else choice.get("message")
    if choice is None or not isinstance(message, dict):
        raise malformed("the first choice of the response has no message")
    content = _content(message)
    called = any(block["type"] == "tool_use" for block in content)
    reason, sequence = stop_reason(
        choice.get("finish_reason"), choice.get("stop_reason"), called=called, stop_sequences=stop_sequences
    )
    usage = chat.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": message_usage(with_estimates(counts, input_tokens, _output_estimate(content))),
    }


def _output_estimate(content: Sequence[Mapping[str, Any]]) -> int:
    """Return an estimate of an answer's tokens: a quarter of its bytes, at least 1."""
    return max(sum(len(as_json(block)) for block in content if block.get("text") != "") // BYTES_PER_TOKEN, 1)


def new_call_id() -> str:
    """Return a new random id for a tool call of a Messages API message."""
    return f"toolu_{secrets.token_hex(12)}"


def text_block(text: str) -> dict[str, Any]:
    """Return a Messages API content block of type `text`."""
    return {"type": "text", "text": text, "citations": None}


def _content(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    reasoning_text = reasoning(message)
    if isinstance(reasoning_text, str) and reasoning_text:
        content.append({"type": "thinking", "thinking": reasoning_text, "signature": SIGNATURE})
    texts = (message.get("content"), message.get("refusal"))
    content += [text_block(text) for text in texts if isinstance(text, str) and text]
    calls = message.get("tool_calls")
    content += [_tool_use(call) for call in (calls if isinstance(calls, list) else ())]
    return content or [text_block("")]


def _tool_use(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise malformed("a tool call in the response has no function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(arguments, dict | str):
        arguments = ""
    tool_input = arguments if isinstance(arguments, dict) else parse_arguments(arguments)
    if not isinstance(name, str) or not name or tool_input is None:
        text = arguments if isinstance(arguments, str) else as_json(arguments).decode()
        return text_block(call_as_text(name if isinstance(name, str) else "", text))
    call_id = call.get("id")
    return {
        "type": "tool_use",
        "id": call_id if isinstance(call_id, str) and call_id else new_call_id(),
        "name": name,
        "input": tool_input,
    }
