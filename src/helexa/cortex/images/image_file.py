"""Checks image files in requests: data URLs, formats and sizes. The gateway does not decode images."""

from helexa.core.errors import ApiError
from helexa.core.image_format import MEDIA_TYPES, data_url

_ALIASES = {"image/jpg": "image/jpeg"}
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


class ImageProblem(Exception):
    """An image of a request cannot be used.

    Attributes:
        code: value of `error.code`, one of the codes of OpenAI's API.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def api_error(self, number: int, param: str | None = None) -> ApiError:
        """Return the 400 error for the image `number` of a request, counted from 1."""
        return ApiError(400, self.code, f"image {number} of the request {self}", param=param)


def check_data_url(url: str, max_bytes: int) -> None:
    """Check a data URL such as `data:image/png;base64,iVBORw0KGgo=`.

    Args:
        url: the URL. It begins with `data:`.
        max_bytes: maximum size of the image file.

    Raises:
        ImageProblem: the URL is not a base64 data URL of a supported media type, or the file is empty or too large.
    """
    header, comma, data = url[len("data:") :].partition(",")
    media_type, *parameters = (part.strip().lower() for part in header.split(";"))
    if not comma or "base64" not in parameters[-1:]:
        raise ImageProblem("invalid_image_url", "must be a URL of the form data:image/png;base64,DATA")
    if _ALIASES.get(media_type, media_type) not in MEDIA_TYPES:
        raise ImageProblem(
            "unsupported_image_media_type",
            f"has the media type {media_type[:80]!r}; supported: {', '.join(MEDIA_TYPES)}",
        )
    content = data.removesuffix("=").removesuffix("=")
    if not content:
        raise ImageProblem("empty_image_file", "is empty")
    if len(data) % 4 or not data.isascii() or content.encode().translate(None, _BASE64):
        raise ImageProblem("invalid_base64_image", "is not valid base64")
    check_size(len(content) * 3 // 4, max_bytes)


def check_size(size: int, max_bytes: int) -> None:
    """Raise an `ImageProblem` if an image file of `size` bytes is larger than `max_bytes`."""
    if size > max_bytes:
        raise ImageProblem("image_too_large", f"is larger than {max_bytes} bytes")


def to_data_url(data: bytes) -> str:
    """Return the data URL of an image file. The media type is that of the file's contents.

    Raises:
        ImageProblem: the file is not a PNG, JPEG, WebP or GIF file.
    """
    url = data_url(data)
    if url is None:
        raise ImageProblem("invalid_image_format", "is not a PNG, JPEG, WebP or GIF file")
    return url
