"""Translates a non-streaming chat completion to a message of the Messages API."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Never

import orjson

from helexa.core.errors import ApiError
from helexa.cortex.anthropic.responses.usage import message_usage, stop_reason

SIGNATURE = "unsigned"
"""Placeholder for Anthropic's signature of thinking. Some clients treat thinking without a signature as text."""


def to_message(
    chat: Mapping[str, Any], model: str, *, message_id: str, stop_sequences: Sequence[str] = ()
) -> dict[str, Any]:
    """Translate a chat completion to a Messages API message.

    Args:
        chat: the chat completion.
        model: model name in the client's request, possibly an alias.
        message_id: id of the message.
        stop_sequences: the client's stop sequences.

    Raises:
        ApiError: 502 `upstream_malformed_response`: the chat completion is malformed.
    """
    choices = chat.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise malformed("it has no message")
    content = _content(message)
    called = any(block["type"] == "tool_use" for block in content)
    reason, sequence = stop_reason(
        choice.get("finish_reason"), choice.get("stop_reason"), called=called, stop_sequences=stop_sequences
    )
    usage = chat.get("usage")
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": message_usage(usage if isinstance(usage, dict) else {}),
    }


def malformed(problem: str) -> ApiError:
    """Return the 502 error for a malformed response of a node. `problem` says what is wrong."""
    return ApiError(
        502, "upstream_malformed_response", f"the node's response is malformed: {problem}", type="api_error"
    )


def as_json(value: Any) -> bytes:
    """Serialize a value from a node's response as JSON.

    Raises:
        ApiError: 502 `upstream_malformed_response` if the value is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        if "64-bit" not in str(error):
            raise malformed(str(error)) from None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()  # writes integers of any size


def reasoning(message: Mapping[str, Any]) -> Any:
    """Return the reasoning of a chat message or delta. Servers send it as `reasoning_content` or `reasoning`."""
    return message.get("reasoning_content") or message.get("reasoning")


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a tool call. Return `{}` for empty text, and None if `text` is not a JSON object."""
    try:
        arguments = json.loads(text, parse_constant=_reject_constant) if text.strip() else {}  # exact for any integer
    except (RecursionError, ValueError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _reject_constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


def call_as_text(name: str, arguments: str) -> str:
    """Return a tool call with invalid arguments as JSON text, which the client receives as text instead of a call."""
    return orjson.dumps({"name": name, "arguments": arguments}).decode()


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
    for number, add_call in enumerate(calls if isinstance(calls, list) else ()):
        content.append(_tool_use(add_call, f"toolu_{number}"))
    return content or [text_block("")]


def _tool_use(add_call: Any, own_id: str) -> dict[str, Any]:
    function = add_call.get("function") if isinstance(add_call, dict) else None
    if not isinstance(function, dict):
        raise malformed("a tool call has no function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(arguments, dict | str):
        arguments = ""
    tool_input = arguments if isinstance(arguments, dict) else parse_arguments(arguments)
    if not isinstance(name, str) or not name or tool_input is None:
        text = arguments if isinstance(arguments, str) else as_json(arguments).decode()
        return text_block(call_as_text(name if isinstance(name, str) else "", text))
    call_id = add_call.get("id")
    return {
        "type": "tool_use",
        "id": call_id if isinstance(call_id, str) and call_id else own_id,
        "name": name,
        "input": tool_input,
    }
