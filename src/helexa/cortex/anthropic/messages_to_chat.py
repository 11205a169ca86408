"""Translates a conversation of the Messages API to chat messages, within limits."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.core.wire.chat_message import is_billing_line
from helexa.cortex.anthropic.message_and_errors import invalid_anthropic_body, shown, to_json

MAX_MESSAGES = 100_000  # the limit of Anthropic's own API
MAX_BLOCKS = 200_000
MAX_TOOLS = 10_000


def check_bounds(body: Mapping[str, Any]) -> None:
    """Reject a Messages API request with too many messages, blocks or tools.

    Raises:
        ApiError: 400 `invalid_anthropic_body`, naming the limit.
    """
    messages, tools = body.get("messages"), body.get("tools")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise _too_many("messages", "messages", MAX_MESSAGES, len(messages))
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise _too_many("tools", "tools", MAX_TOOLS, len(tools))
    contents = [body.get("system")]
    if isinstance(messages, list):
        contents += [message.get("content") for message in messages if isinstance(message, dict)]
    count = 0
    while contents:
        content = contents.pop()
        if not isinstance(content, list):
            continue
        count += len(content)
        if count > MAX_BLOCKS:
            raise _too_many("messages", "content blocks in all", MAX_BLOCKS, count)
        for block in content:
            if isinstance(block, dict):  # tool results, documents and search results contain blocks, too
                source = block.get("source")
                contents += (block.get("content"), source.get("content") if isinstance(source, dict) else None)


def _too_many(field: str, noun: str, limit: int, count: int) -> ApiError:
    return invalid_anthropic_body(field, f"has {count} {noun}; the limit is {limit}, so send fewer")


# A text part `{"type": "text", "text"}` or an image part `{"type": "image_url", "image_url": {"url"}}`.
Part = dict[str, Any]

_MEDIA_TYPE = re.compile(r"image/[\w.+-]{1,64}")


def blocks(content: Any, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each content block of a Messages API message, with the block's JSON path.

    A string is treated as one text block, and null as an empty list.

    Args:
        content: value of the message's `content`.
        field: JSON path of `content`.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: the content is malformed.
    """
    if isinstance(content, str):
        yield field, {"type": "text", "text": content}
        return
    if content is not None and not isinstance(content, list):
        raise invalid_anthropic_body(field, "must be a string or a list of blocks")
    for index, block in enumerate(content or ()):
        path = f"{field}.{index}"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid_anthropic_body(path, "must be an object with a 'type'")
        yield path, block


def parts(block: Mapping[str, Any], field: str) -> list[Part]:
    """Translate one of Anthropic's content blocks to content parts of a chat message.

    Args:
        block: a block from `blocks`.
        field: path of the block in the request body, for error messages.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: the block is malformed, or the source of an image or document is not
            supported.
    """
    match block["type"]:
        case "text":
            return [text_part(string(block, "text", field))]
        case "image":
            return [{"type": "image_url", "image_url": {"url": _image_url(block, field)}}]
        case "document":
            return _document(block, field)
        case "search_result":
            titles = [value for name in ("title", "source") if isinstance(value := block.get(name), str)]
            return [*map(text_part, titles), *_all_parts(block.get("content"), f"{field}.content")]
        case _:
            # A block of an unknown type is shown to the model as JSON, so that no content is lost.
            fields = {name: value for name, value in block.items() if name != "cache_control"}
            return [text_part(to_json(fields).decode())]


def _all_parts(content: Any, field: str) -> list[Part]:
    """Translate the content blocks in `content` to parts of one chat message."""
    return [part for path, block in blocks(content, field) for part in parts(block, path)]


def text_part(text: str) -> Part:
    """Return a content part of type `text` for a chat message."""
    return {"type": "text", "text": text}


def _join_parts(content: list[Part]) -> str | list[Part]:
    """Return the `content` of a chat message with these parts, without empty texts."""
    content = [part for part in content if part.get("text") != ""]
    # If all parts are texts, they become one string, which every chat template accepts.
    if any(part["type"] != "text" for part in content):
        return content
    return "\n".join([part["text"] for part in content])


def string(fields: Mapping[str, Any], name: str, field: str) -> str:
    """Return the string `fields[name]` of a Messages API conversation.

    `field` is the JSON path of `fields` in the request body, used in the error message.

    Raises:
        ApiError: 400 `invalid_anthropic_body` if the value is missing or not a string.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        raise invalid_anthropic_body(f"{field}.{name}", "must be a string")
    return value


def _source(block: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise invalid_anthropic_body(f"{field}.source", "must be an object")
    return source


def _image_url(block: Mapping[str, Any], field: str) -> str:
    source, field = _source(block, field), f"{field}.source"
    kind = source.get("type")
    if kind == "base64":
        media_type = source.get("media_type", "image/png")
        if not isinstance(media_type, str) or not _MEDIA_TYPE.fullmatch(media_type):
            raise invalid_anthropic_body(
                f"{field}.media_type", f"must be the type of an image, such as image/png, not {shown(media_type)}"
            )
        return f"data:{media_type};base64,{string(source, 'data', field)}"
    if kind == "url":
        url = string(source, "url", field)
        if not url.lower().startswith(("https://", "http://")):
            raise invalid_anthropic_body(f"{field}.url", "must begin with https:// or http://")
        return url
    raise invalid_anthropic_body(f"{field}.type", f"must be 'base64' or 'url' for images, not {shown(kind)}")


def _document(block: Mapping[str, Any], field: str) -> list[Part]:
    source = _source(block, field)
    titles = [text_part(value) for name in ("title", "context") if isinstance(value := block.get(name), str) and value]
    kind = source.get("type")
    if kind == "text":
        return [*titles, text_part(string(source, "data", f"{field}.source"))]
    if kind == "content":
        return [*titles, *_all_parts(source.get("content"), f"{field}.source.content")]
    raise invalid_anthropic_body(
        f"{field}.source.type", f"must be 'text' or 'content' for documents, not {shown(kind)}"
    )


ChatMessage = dict[str, Any]
_Blocks = Iterable[tuple[str, Mapping[str, Any]]]  # content blocks, each with its JSON path in the request body

_NO_ID = "toolu_unknown"
_SYSTEM_ROLES = ("system", "developer")


def chat_messages(system: Any, messages: Any) -> list[ChatMessage]:
    """Translate system prompt and messages of a Messages API request to chat messages.

    The first chat message contains all system prompts, if any, separated by empty lines. The text blocks of one system
    prompt are joined by line breaks. Successive messages of the same role become one. Each tool result becomes a
    `tool` message.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: a field is invalid. The message names the field.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid_anthropic_body("messages", "must be a list of at least one message")
    prompts = [_system_text(system, "system")]
    turns: list[tuple[str, list[tuple[str, Mapping[str, Any]]]]] = []
    for index, message in enumerate(messages):
        field = f"messages.{index}"
        if not isinstance(message, dict):
            raise invalid_anthropic_body(field, "must be an object")
        role, content = message.get("role"), message.get("content")
        if role in _SYSTEM_ROLES:
            prompts.append(_system_text(content, f"{field}.content"))
        elif role not in ("user", "assistant"):
            raise invalid_anthropic_body(f"{field}.role", f"must be 'user', 'assistant' or 'system', not {shown(role)}")
        # Join the message to the previous turn, as Anthropic's own API does. Many chat templates and servers reject two
        # turns of the same role in a row.
        elif turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks(content, f"{field}.content"))
        else:
            turns.append((role, list(blocks(content, f"{field}.content"))))
    chat: list[ChatMessage] = []
    for role, content_blocks in turns:
        chat += _user_turns(content_blocks) if role == "user" else [_assistant_turn(content_blocks)]
    prompt = "\n\n".join([text for text in prompts if text])
    if not prompt and not chat:
        raise invalid_anthropic_body("messages", "must not be empty")
    return [{"role": "system", "content": prompt}, *chat] if prompt else chat


def _system_text(content: Any, field: str) -> str:
    texts: list[str] = []
    for path, block in blocks(content, field):
        if block["type"] != "text":
            raise invalid_anthropic_body(
                path, f"must be a text block, not {shown(block['type'])}: a system prompt contains only text"
            )
        texts.append(string(block, "text", path))
    return "\n".join([text for text in texts if not is_billing_line(text)])


def _user_turns(content: _Blocks) -> list[ChatMessage]:
    """Return one `tool` message per tool result, then one `user` message.

    The `user` message contains all other blocks. It is left out if there are only tool results.
    """
    results: list[ChatMessage] = []
    content_parts: list[Part] = []
    for path, block in content:
        if block["type"] == "tool_result":
            results.append(_tool_result(block, path))
        elif block["type"] == "tool_use":
            raise invalid_anthropic_body(path, "'tool_use' is only allowed in assistant messages")
        else:
            content_parts += parts(block, path)
    if content_parts or not results:
        results.append({"role": "user", "content": _join_parts(content_parts)})
    return results


def _tool_result(block: Mapping[str, Any], field: str) -> ChatMessage:
    content = _all_parts(block.get("content"), f"{field}.content")
    if block.get("is_error") is True:
        content.insert(0, text_part("Error:"))  # chat messages have no field for errors
    return {"role": "tool", "tool_call_id": _id(block.get("tool_use_id")), "content": _join_parts(content)}


def _assistant_turn(content: _Blocks) -> ChatMessage:
    text_parts: list[Part] = []
    reasoning_texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, block in content:
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
    message: ChatMessage = {"role": "assistant", "content": _join_parts(text_parts)}
    if any(reasoning_texts):
        message["reasoning_content"] = "\n".join([text for text in reasoning_texts if text])
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise invalid_anthropic_body(f"{field}.input", "must be an object")
    # The arguments are an object and not JSON text, because chat templates iterate over them.
    function = {"name": string(block, "name", field), "arguments": arguments or {}}
    return {"id": _id(block.get("id")), "type": "function", "function": function}


def _id(value: Any) -> str:
    return value if isinstance(value, str) and value else _NO_ID
