"""Translates content blocks of the Messages API to parts of a chat message."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from helexa.cortex.anthropic.errors import invalid_anthropic_body
from helexa.cortex.anthropic.requests.body import to_json

Part = dict[str, Any]
"""A text part `{"type": "text", "text"}` or an image part `{"type": "image_url", "image_url": {"url"}}`."""

_MEDIA_TYPE = re.compile(r"image/[\w.+-]{1,64}")


def blocks(content: Any, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each content block of a message as a pair: the block's JSON path in the request body, and the block.

    A string is treated as one text block, and null as an empty list.

    Args:
        content: value of the message's `content`.
        field: JSON path of `content` in the request body.

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
    """Translate one content block to content parts of a chat message.

    A block of an unknown type becomes a text part that contains the block as JSON. `field` is the block's JSON path in
    the request body.

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
            return [*map(text_part, titles), *all_parts(block.get("content"), f"{field}.content")]
        case _:
            fields = {name: value for name, value in block.items() if name != "cache_control"}
            return [text_part(to_json(fields).decode())]


def all_parts(content: Any, field: str) -> list[Part]:
    """Translate all content blocks of `content` to content parts of a chat message, in order."""
    return [part for path, block in blocks(content, field) for part in parts(block, path)]


def text_part(text: str) -> Part:
    """Return a text part of a chat message."""
    return {"type": "text", "text": text}


def join_parts(content: list[Part]) -> str | list[Part]:
    """Return the value for the `content` field of a chat message with these parts.

    If all parts are text, the value is one string: the texts joined by line breaks. Otherwise it is the list of parts.
    """
    if any(part["type"] != "text" for part in content):
        return content
    return "\n".join([part["text"] for part in content])


def string(fields: Mapping[str, Any], name: str, field: str) -> str:
    """Return the string `fields[name]`.

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
            raise invalid_anthropic_body(f"{field}.media_type", "must be the type of an image, such as image/png")
        return f"data:{media_type};base64,{string(source, 'data', field)}"
    if kind == "url":
        url = string(source, "url", field)
        if not url.lower().startswith(("https://", "http://")):
            raise invalid_anthropic_body(f"{field}.url", "must begin with https:// or http://")
        return url
    raise invalid_anthropic_body(f"{field}.type", "must be 'base64' or 'url' for images")


def _document(block: Mapping[str, Any], field: str) -> list[Part]:
    source = _source(block, field)
    titles = [text_part(value) for name in ("title", "context") if isinstance(value := block.get(name), str) and value]
    kind = source.get("type")
    if kind == "text":
        return [*titles, text_part(string(source, "data", f"{field}.source"))]
    if kind == "content":
        return [*titles, *all_parts(source.get("content"), f"{field}.source.content")]
    raise invalid_anthropic_body(f"{field}.source.type", "must be 'text' or 'content' for documents")
