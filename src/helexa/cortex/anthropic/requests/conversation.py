"""Translates a conversation of the Messages API to chat messages."""

from collections.abc import Mapping
from typing import Any

from helexa.cortex.anthropic.errors import invalid_anthropic_body
from helexa.cortex.anthropic.requests.content import Part, all_parts, blocks, join_parts, parts, string, text_part

ChatMessage = dict[str, Any]

# Claude Code sends this billing line for Anthropic before its system prompt. The line is not part of the prompt. The
# line differs in every request, so with it the prompt would never be found in a prefix cache.
_ACCOUNTING = "x-anthropic-billing-header:"
_NO_ID = "toolu_unknown"
_SYSTEM_ROLES = ("system", "developer")


def chat_messages(system: Any, messages: Any) -> list[ChatMessage]:
    """Translate the system prompt and the messages of a Messages API request to chat messages.

    The first chat message contains all system prompts, separated by empty lines. The translated user and assistant
    messages follow it. The text blocks of one system prompt are joined by line breaks.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: a field is invalid. The message names the field.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid_anthropic_body("messages", "must be a list of at least one message")
    prompts = [_system_text(system, "system")]
    chat: list[ChatMessage] = []
    for index, message in enumerate(messages):
        field = f"messages.{index}"
        if not isinstance(message, dict):
            raise invalid_anthropic_body(field, "must be an object")
        role, content = message.get("role"), message.get("content")
        if role in _SYSTEM_ROLES:
            prompts.append(_system_text(content, f"{field}.content"))
        elif role == "user":
            chat += _user_turns(content, f"{field}.content")
        elif role == "assistant":
            chat.append(_assistant_turn(content, f"{field}.content"))
        else:
            raise invalid_anthropic_body(f"{field}.role", "must be 'user', 'assistant' or 'system'")
    prompt = "\n\n".join([text for text in prompts if text])
    if not prompt and not chat:
        raise invalid_anthropic_body("messages", "must not be empty")
    return [{"role": "system", "content": prompt}, *chat] if prompt else chat


def _system_text(content: Any, field: str) -> str:
    texts: list[str] = []
    for path, block in blocks(content, field):
        if block["type"] != "text":
            raise invalid_anthropic_body(path, "must be a text block: a system prompt contains only text")
        texts.append(string(block, "text", path))
    return "\n".join([text for text in texts if not text.startswith(_ACCOUNTING)])


def _user_turns(content: Any, field: str) -> list[ChatMessage]:
    """Translate a user message to chat messages: one `tool` message per tool result, then one `user` message."""
    results: list[ChatMessage] = []
    content_parts: list[Part] = []
    for path, block in blocks(content, field):
        if block["type"] == "tool_result":
            results.append(_tool_result(block, path))
        elif block["type"] == "tool_use":
            raise invalid_anthropic_body(path, "'tool_use' is only allowed in assistant messages")
        else:
            content_parts += parts(block, path)
    if content_parts or not results:
        results.append({"role": "user", "content": join_parts(content_parts)})
    return results


def _tool_result(block: Mapping[str, Any], field: str) -> ChatMessage:
    content = all_parts(block.get("content"), f"{field}.content")
    if block.get("is_error") is True:
        content.insert(0, text_part("Error:"))  # chat messages have no field for errors
    return {"role": "tool", "tool_call_id": _id(block.get("tool_use_id")), "content": join_parts(content)}


def _assistant_turn(content: Any, field: str) -> ChatMessage:
    text_parts: list[Part] = []
    reasoning_texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, block in blocks(content, field):
        match block["type"]:
            case "tool_use":
                calls.append(_tool_call(block, path))
            case "thinking":
                reasoning_texts.append(string(block, "thinking", path))
            case "redacted_thinking":
                pass  # encrypted by Anthropic, so no other model can read it
            case "tool_result":
                raise invalid_anthropic_body(path, "'tool_result' is only allowed in user messages")
            case _:
                text_parts += parts(block, path)
    message: ChatMessage = {"role": "assistant", "content": join_parts(text_parts)}
    if any(reasoning_texts):
        message["reasoning_content"] = "\n".join([text for text in reasoning_texts if text])
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise invalid_anthropic_body(f"{field}.input", "must be an object")
    # An object, not its JSON text: chat templates iterate over the arguments.
    function = {"name": string(block, "name", field), "arguments": arguments or {}}
    return {"id": _id(block.get("id")), "type": "function", "function": function}


def _id(value: Any) -> str:
    return value if isinstance(value, str) and value else _NO_ID
