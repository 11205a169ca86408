"""Estimates the number of tokens of an image from its width and height, which the first bytes of its file contain."""

import binascii
import struct

TYPICAL_TOKENS = 1024
"""Estimated number of tokens of an image of unknown size."""
MIN_TOKENS = 64
MAX_TOKENS = 4096
LOW_DETAIL_TOKENS = 256
"""Maximum number of tokens of an image with the detail `low` on helexa's nodes."""

_PIXELS_PER_TOKEN = 32 * 32  # Qwen models; most others have fewer tokens
_HEAD_CHARS = 64 << 10  # a multiple of 4
_MAX_JPEG_SEGMENTS = 64
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of JPEG segments that contain the size


def image_tokens(url: str, detail: str | None = None) -> int:
    """Return the estimated number of tokens of an image.

    Args:
        url: URL of the image. The estimate for an http(s) URL or a damaged file is `TYPICAL_TOKENS`.
        detail: value of `detail` in the request, or None.
    """
    size = _size(_head(url))
    tokens = TYPICAL_TOKENS
    if size is not None:
        tokens = min(max(size[0] * size[1] // _PIXELS_PER_TOKEN, MIN_TOKENS), MAX_TOKENS)
    return min(tokens, LOW_DETAIL_TOKENS) if detail == "low" else tokens


def _head(url: str) -> bytes:
    """Return the first bytes of the file in a data URL, or no bytes if the URL is not a valid data URL."""
    start = url.find(",") + 1
    try:
        return binascii.a2b_base64(url[start : start + _HEAD_CHARS]) if url[:5].lower() == "data:" else b""
    except ValueError:
        return b""


def _size(head: bytes) -> tuple[int, int] | None:
    """Return width and height of an image file, or None if its first bytes do not contain them."""
    try:
        if head.startswith(b"\x89PNG"):
            return struct.unpack_from(">II", head, 16)
        if head.startswith(b"GIF8"):
            return struct.unpack_from("<HH", head, 6)
        if head.startswith(b"\xff\xd8"):
            return _jpeg_size(head)
        if head[8:12] == b"WEBP":
            return _webp_size(head)
    except (struct.error, IndexError):
        pass
    return None


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    position = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        marker, length = struct.unpack_from(">xBH", head, position)
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", head, position + 5)
            return width, height
        position += 2 + length
    return None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    match head[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", head, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", head, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    return None
