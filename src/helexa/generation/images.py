"""Converts images to content parts of chat messages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helexa.core.image_format import data_url
from helexa.generation.errors import InvalidRequestError

Image = str | Path | bytes
"""An image: the path of a file, the contents of a file, or a URL (`data:`, `http:` or `https:`)."""

_URLS = ("data:", "http://", "https://")
_MAX_BYTES = 64 << 20


def image_part(image: Image, folder: Path | None = None) -> dict[str, Any]:
    """Return the content part of a chat message for an image. A file becomes a data URL.

    Args:
        image: the image.
        folder: folder of relative paths. None means the working directory.

    Raises:
        InvalidRequestError: the file cannot be read, is too large, or is not a PNG, JPEG, WebP or GIF file.
    """
    if isinstance(image, str) and image.lower().startswith(_URLS):
        return _part(image)
    if isinstance(image, bytes):
        name, data = "the image", image
    elif isinstance(image, str | Path):
        name, data = str(image), _contents((folder or Path()) / image)
    else:
        raise InvalidRequestError(f"an image is a path, a URL or bytes, not {type(image).__name__}")
    if len(data) > _MAX_BYTES:
        raise InvalidRequestError(f"{name}: is larger than {_MAX_BYTES} bytes")
    url = data_url(data)
    if url is None:
        raise InvalidRequestError(f"{name}: is not a PNG, JPEG, WebP or GIF file")
    return _part(url)


def with_images(messages: list[dict[str, Any]], images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with image parts at the beginning of the last message.

    Raises:
        InvalidRequestError: the last message is not a message of the user.
    """
    if not images:
        return messages
    *earlier, last = messages
    if last["role"] != "user":
        raise InvalidRequestError("images need a conversation that ends with a message of the user")
    content = last.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*earlier, {**last, "content": [*images, *parts]}]


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _contents(path: Path) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InvalidRequestError(f"{path}: {reason or 'is not a path'}") from None
