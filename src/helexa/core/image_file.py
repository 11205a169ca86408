"""Image files in requests: data URLs, formats, sizes, and estimates of tokens."""

import base64
import binascii
import struct

from helexa.core.errors import ApiError

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}

_ALIASES = {"image/jpg": "image/jpeg"}
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


class ImageProblem(Exception):
    """An image of a request cannot be used."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # value of `error.code`, one of the codes of OpenAI's API

    def api_error(self, number: int, param: str | None = None) -> ApiError:
        """Return the 400 error for the image `number` of a request, counted from 1."""
        return ApiError(400, self.code, f"image {number} of the request: {self}", param=param)


def check_data_url(url: str, max_bytes: int) -> None:
    """Check a data URL such as `data:image/png;base64,iVBORw0KGgo=`.

    Raises:
        ImageProblem: the URL is not a base64 data URL of a supported media type, or the file is empty or larger than
            `max_bytes`.
    """
    header, comma, data = url[len("data:") :].partition(",")
    media_type, *parameters = (part.strip().lower() for part in header.split(";"))
    if not comma or "base64" not in parameters[-1:]:
        raise ImageProblem("invalid_image_url", "the image URL must have the form data:image/png;base64,DATA")
    if _ALIASES.get(media_type, media_type) not in MEDIA_TYPES:
        raise ImageProblem(
            "unsupported_image_media_type",
            f"the image has the media type {media_type[:80]!r}; send one of {', '.join(MEDIA_TYPES)}",
        )
    content = data.removesuffix("=").removesuffix("=")
    if not content:
        raise ImageProblem("empty_image_file", "the image is empty; send the file's bytes after 'base64,'")
    if len(data) % 4 or not data.isascii() or content.encode().translate(None, _BASE64):
        raise ImageProblem(
            "invalid_base64_image", "the image is not valid base64; encode the file in base64 with padding"
        )
    check_size(len(content) * 3 // 4, max_bytes)


def check_size(size: int, max_bytes: int) -> None:
    """Raise an `ImageProblem` if an image file is larger than `max_bytes`."""
    if size > max_bytes:
        raise ImageProblem(
            "image_too_large",
            f"the image has more than {max_bytes} bytes; send a smaller image, or raise images.max_image_mb",
        )


def to_data_url(data: bytes) -> str:
    """Return an image file as a data URL with the media type of its contents.

    Raises:
        ImageProblem: the file is not a PNG, JPEG, WebP or GIF file.
    """
    url = data_url(data)
    if url is None:
        raise ImageProblem(
            "invalid_image_format",
            "the image is not a PNG, JPEG, WebP or GIF file; convert the image to one of these formats",
        )
    return url


TYPICAL_TOKENS = 1024  # estimated number of tokens of an image of unknown size
MIN_TOKENS = 64
MAX_TOKENS = 4096
LOW_DETAIL_TOKENS = 256  # maximum number of tokens of an image with the detail `low` on helexa's nodes

_PIXELS_PER_TOKEN = 32 * 32  # as in Qwen models; most other models need fewer tokens per image
_HEAD_CHARS = 64 << 10  # number of base64 characters that are decoded to find the size of an image; a multiple of 4
# In JPEG files of cameras, the segment with the image size is one of the first. The limit bounds the work on a file of
# many tiny segments.
_MAX_JPEG_SEGMENTS = 64
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of JPEG segments that contain the size


def image_tokens(url: str, detail: str | None = None) -> int:
    """Return the estimated number of tokens of the image with the URL `url`.

    The estimate for an http(s) URL or a file whose size cannot be read is `TYPICAL_TOKENS`. `detail` is the field
    `detail` of the image in the request, or None if it is not set. If it is `low`, the result is at most
    `LOW_DETAIL_TOKENS`.
    """
    size = _size(_head(url))
    tokens = TYPICAL_TOKENS
    if size is not None:
        tokens = min(max(size[0] * size[1] // _PIXELS_PER_TOKEN, MIN_TOKENS), MAX_TOKENS)
    return min(tokens, LOW_DETAIL_TOKENS) if detail == "low" else tokens


def _head(url: str) -> bytes:
    """Return the first bytes of the file in a data URL; none if `url` is no data URL."""
    start = url.find(",") + 1
    try:
        return binascii.a2b_base64(url[start : start + _HEAD_CHARS]) if url[:5].lower() == "data:" else b""
    except ValueError:
        return b""


def _size(head: bytes) -> tuple[int, int] | None:
    """Return width and height of an image file, or None if `head` lacks them."""
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


def media_type(data: bytes) -> str | None:
    """Return the media type of an image file, or None if its format is not supported."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _SIGNATURES.items() if data.startswith(start)), None)


def data_url(data: bytes) -> str | None:
    """Return an image file as a data URL, or None if the format is not supported."""
    kind = media_type(data)
    return None if kind is None else f"data:{kind};base64,{base64.b64encode(data).decode()}"
