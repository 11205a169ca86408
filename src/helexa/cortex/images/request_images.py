"""Finds the images in a request body, checks them, and replaces their URLs."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import orjson

from helexa.core.errors import ApiError, invalid_body, unsupported_parameter
from helexa.core.wire.chat_message import IMAGE_PARTS
from helexa.cortex.images.image_file import ImageProblem, check_data_url
from helexa.cortex.requests.rewrite import rewrite
from helexa.cortex.usage.image_tokens import image_tokens
from helexa.cortex.usage.media_tokens import NO_IMAGES, PromptImages

DETAILS = ("auto", "low", "high", "original")
"""Values of `detail`. The Responses API also has `original`."""

_CONVERSATIONS = ("messages", "input")
_CONTENTS = ("content", "output")


class ImageLimits(msgspec.Struct, frozen=True):
    """Limits on the images of one request.

    Attributes:
        max_images: maximum number of images.
        max_bytes: maximum size of one image file.
        fetches: True if the gateway fetches images from http(s) URLs.
    """

    max_images: int
    max_bytes: int
    fetches: bool


class RemoteImage(msgspec.Struct, frozen=True):
    """An image that must be fetched: its number in the request, counted from 1, its http(s) URL, and its `detail`."""

    number: int
    url: str
    detail: str | None = None


class CheckedImages(msgspec.Struct, frozen=True):
    """The images of one request body.

    Attributes:
        images: number of images, the bytes of their data URLs, and their estimated tokens.
        remote: the images that must be fetched.
    """

    images: PromptImages = NO_IMAGES
    remote: tuple[RemoteImage, ...] = ()


def count_images(body: bytes) -> int:
    """Return the number of images in a request body. They are not checked."""
    return sum(1 for _ in _parts(_read(body)))


def check_images(body: bytes, limits: ImageLimits) -> CheckedImages:
    """Check all images of a request body.

    Raises:
        ApiError: 400: an image is invalid or there are too many images. The message contains the number of the image.
    """
    count, url_bytes, tokens, remote = 0, 0, 0, list[RemoteImage]()
    for field, part in _parts(_read(body)):
        count += 1
        if count > limits.max_images:
            raise ApiError(400, "too_many_images", f"the request has more than {limits.max_images} images", param=field)
        url, detail = _checked_url(part, field, count)
        if url[:5].lower() == "data:":
            url_bytes += len(url)
            try:
                check_data_url(url, limits.max_bytes)
            except ImageProblem as problem:
                raise problem.api_error(count, field) from None
        elif url[:8].lower().startswith(("http://", "https://")):
            if not limits.fetches:
                problem = ImageProblem(
                    "invalid_image_url",
                    "is at an http(s) URL, and this gateway fetches no images; send data:image/png;base64,DATA",
                )
                raise problem.api_error(count, field)
            remote.append(RemoteImage(count, url, detail))
        else:
            raise ImageProblem("invalid_image_url", "must be a data URL or an http(s) URL").api_error(count, field)
        tokens += image_tokens(url, detail)
    return CheckedImages(PromptImages(count, url_bytes, tokens), tuple(remote))


def replace_urls(body: bytes, data_urls: Mapping[str, str]) -> bytes:
    """Return the request body with the URLs of images replaced. `data_urls` contains the new URL for each old URL."""
    content = _read(body)
    for _, part in _parts(content):
        image = part["image_url"]
        if isinstance(image, dict):
            image["url"] = data_urls.get(image["url"], image["url"])
        else:
            part["image_url"] = data_urls.get(image, image)
    return rewrite(body, {name: msgspec.Raw(orjson.dumps(content[name])) for name in _CONVERSATIONS if name in content})


def _read(body: bytes) -> dict[str, Any]:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_body(f"the request body is not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _parts(body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each image part of a chat or Responses API request: its JSON path in the request body, and the part."""
    for name in _CONVERSATIONS:
        items = body.get(name)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            for key in _CONTENTS if isinstance(item, dict) else ():
                content = item.get(key)
                if isinstance(content, dict) and "image_url" in content:  # the output of a computer call
                    yield f"{name}.{index}.{key}", content
                for position, part in enumerate(content if isinstance(content, list) else ()):
                    if isinstance(part, dict) and _is_image(part):
                        yield f"{name}.{index}.{key}.{position}", part


def _is_image(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return "image_url" in part or (isinstance(kind, str) and kind in IMAGE_PARTS)


def _checked_url(part: Mapping[str, Any], field: str, number: int) -> tuple[str, str | None]:
    """Check an image part, and return the image's URL and its `detail`."""
    image = part.get("image_url")
    settings = image if isinstance(image, dict) else part
    detail = settings.get("detail")
    if detail is not None and detail not in DETAILS:
        raise invalid_body(f"{field}.detail: must be one of {', '.join(DETAILS)}", f"{field}.detail")
    url = image.get("url") if isinstance(image, dict) else image
    if isinstance(url, str):
        return url, detail
    if part.get("file_id") is not None:
        raise unsupported_parameter(
            f"{field}.file_id",
            f"image {number} of the request is a stored file, and helexa stores no files; send it as a data URL",
        )
    raise invalid_body(f"{field}: must have an 'image_url'", field)
