"""Formats of images in prompts, and data URLs of image files."""

import base64

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")

_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


def media_type(data: bytes) -> str | None:
    """Return the media type of an image file, or None if it is not supported."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _SIGNATURES.items() if data.startswith(start)), None)


def data_url(data: bytes) -> str | None:
    """Return an image file as a data URL, or None if the format is not supported."""
    kind = media_type(data)
    return None if kind is None else f"data:{kind};base64,{base64.b64encode(data).decode()}"
