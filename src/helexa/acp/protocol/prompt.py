"""Converts the content blocks of the editor's prompts to message parts."""

import binascii
from typing import Any
from urllib.parse import unquote, urlsplit

from helexa.acp.history import Image, Part, Text
from helexa.acp.protocol.rejection import invalid_params

IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def read_prompt(blocks: list[Any]) -> tuple[Part, ...]:
    """Return the message parts (text and images) for the content blocks of a prompt.

    Args:
        blocks: the content blocks, as objects of the SDK's classes.

    Raises:
        RpcError: the prompt is empty or contains unsupported content.
    """
    parts: list[Part] = []
    for block in blocks:
        match block.type:
            case "text":
                parts.append(Text(block.text))
            case "image":
                parts.append(_image(block.mime_type, block.data, block.uri))
            case "resource_link":
                parts.append(Text(f"[{block.name}]({_path_or_uri(block.uri)})"))
            case "resource":
                parts.append(_resource(block.resource))
            case kind:
                raise invalid_params(f"{kind} content is not supported in prompts")
    if not any(not isinstance(part, Text) or part.text.strip() for part in parts):
        raise invalid_params("the prompt is empty")
    return tuple(parts)


def _resource(resource: Any) -> Part:
    text = getattr(resource, "text", None)
    if text is not None:
        return Text(f'<resource path="{_path_or_uri(resource.uri)}">\n{text}\n</resource>')
    mime_type = resource.mime_type or ""
    if mime_type in IMAGE_TYPES:
        return _image(mime_type, resource.blob, resource.uri)
    return Text(f"[{_path_or_uri(resource.uri)} is attached, but is not text]")


def _image(mime_type: str, data: str, uri: str | None) -> Image:
    if mime_type not in IMAGE_TYPES:
        raise invalid_params(f"an image must be one of {', '.join(IMAGE_TYPES)}")
    try:
        binascii.a2b_base64(data, strict_mode=True)
    except ValueError:
        raise invalid_params("the data of an image must be base64") from None
    return Image(mime_type, data, uri)


def _path_or_uri(uri: str) -> str:
    """Return the path in a `file:` URI, because tools accept paths. Return any other URI unchanged."""
    if not uri.startswith("file://"):
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri
    return unquote(parts.path) + (f"#{parts.fragment}" if parts.fragment else "")
