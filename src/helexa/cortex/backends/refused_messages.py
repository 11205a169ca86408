"""Messages that a backend refuses: lists of texts, lost reasoning, order of roles."""

import re
from typing import Any

from helexa.cortex.backends.chat_request import changed_messages, with_one_text

# Errors of DeepSeek's server, of Python's templates and encoders, and of Ollama.
_REFUSED_PARTS = re.compile(
    rb"sequence, expected a string|expected str instance, list found|can only concatenate str \(not"
    rb"|cannot unmarshal array into Go .{0,80}content",
    re.IGNORECASE,
)


def refuses_parts(error: bytes) -> bool:
    """Return whether an error response says that content must be a text."""
    return _REFUSED_PARTS.search(error) is not None


def with_plain_texts(body: bytes) -> bytes:
    """Return a chat request in which content of several texts is one text."""
    return changed_messages(body, lambda messages: [with_one_text(message) for message in messages])


_REQUIRED_REASONING = re.compile(
    rb"(?:missing|must (?:include|contain)|requires?)\b.{0,80}\breasoning_content\b"
    rb"|\breasoning_content\b.{0,80}\b(?:must be passed back|is missing|is required)",
    re.IGNORECASE | re.DOTALL,
)


def requires_reasoning(error: bytes) -> bool:
    """Return whether an error of DeepSeek or Moonshot says that reasoning is missing."""
    return _REQUIRED_REASONING.search(error) is not None


def with_reasoning(body: bytes) -> bytes:
    """Return a chat request in which all messages of the assistant have reasoning."""
    # Clients lose the reasoning, and messages of other models have none. An empty text is refused.
    return changed_messages(body, lambda messages: [_with_reasoning(message) for message in messages])


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") != "assistant" or message.get("reasoning_content"):
        return message
    # DeepSeek's models repeat a text that is equal in all messages, and then end without an answer.
    calls = message.get("tool_calls")
    ids = [str(call.get("id")) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return message | {"reasoning_content": " ".join(ids) or " "}


_REFUSED_ORDER = re.compile(
    rb"\balternat(?:e|ing)\b|unexpected role|comes? immediately after"
    rb"|(?:successive|consecutive) (?:user|assistant|messages)",
    re.IGNORECASE,
)
_BETWEEN = "\n\n"


def refuses_order(error: bytes) -> bool:
    """Return whether an error response is about the order of the roles of messages."""
    return _REFUSED_ORDER.search(error) is not None


def with_alternating_roles(body: bytes) -> bytes:
    """Return a chat request in which user and assistant alternate. No text is lost.

    * Consecutive messages of the user become one message, and so do consecutive messages of the assistant.
    * The text of a message of the user that follows a tool result joins this result.
    """
    # Chat templates of Mistral's and Google's models, and APIs of some providers, reject two messages of one role in a
    # row. Mistral's also reject a message of the user after a tool result.
    return changed_messages(body, _alternating)


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in messages:
        before = turns[-1] if turns else {}
        roles = before.get("role"), message.get("role")
        is_same = roles in (("user", "user"), ("assistant", "assistant"))
        if is_same or (roles == ("tool", "user") and isinstance(message.get("content"), str)):
            turns[-1] = _merged(before, message)
        else:
            turns.append(message)
    return turns


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    merged = first | {"content": _joined(first.get("content"), second.get("content"))}
    for name in ("reasoning_content", "tool_calls"):
        if second.get(name):
            merged[name] = _joined(first.get(name), second[name])
    return merged


def _joined(first: Any, second: Any) -> Any:
    """Join two texts, or two lists of content parts. A text becomes a part if needed."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_BETWEEN}{second}"
    return [part for content in (first, second) for part in _as_parts(content)]


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
