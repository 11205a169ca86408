"""Images in request bodies: finds, checks and fetches them."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from helexa.core.errors import ApiError, invalid_body, unsupported_parameter, vision_unsupported
from helexa.core.image_file import ImageProblem, check_data_url, image_tokens
from helexa.core.wire.chat_message import IMAGE_PARTS
from helexa.cortex.config import ImagesSection
from helexa.cortex.forwarding.request import rewrite
from helexa.cortex.forwarding.request_body_limit_and_workers import BodyWorkers, is_large
from helexa.cortex.forwarding.token_bounds import NO_IMAGES, PromptImages, has_media
from helexa.cortex.image_fetcher import FetchMemory, ImageFetcher
from helexa.http.service_and_memory_budget import BodyBudget

DETAILS = ("auto", "low", "high", "original")  # values of an image's `detail`; only the Responses API has `original`

_CONVERSATIONS = ("messages", "input")
_CONTENTS = ("content", "output")


class ImageLimits(msgspec.Struct, frozen=True):
    """Limits on the images of one request."""

    max_images: int  # maximum number of images
    max_bytes: int  # maximum size of one image file
    fetches: bool  # True if the gateway fetches images from http(s) URLs


class RemoteImage(msgspec.Struct, frozen=True):
    """An image that must be fetched."""

    number: int  # number of the image in the request, counted from 1
    url: str  # its http(s) URL
    detail: str | None = None  # value of the image's field `detail`; None if it is absent


class CheckedImages(msgspec.Struct, frozen=True):
    """The images of one request body."""

    images: PromptImages = NO_IMAGES  # number of images, the bytes of their data URLs, and their estimated tokens
    remote: tuple[RemoteImage, ...] = ()  # the images that must be fetched


def count_images(body: bytes) -> int:
    """Return the number of images in a request body. They are not checked."""
    return sum(1 for _ in _parts(_read(body)))


def check_images(body: bytes, limits: ImageLimits) -> CheckedImages:
    """Check all images of a request body.

    Raises:
        ApiError: 400: the body is not JSON, an image is invalid (the message contains its number), or there are too
            many images.
    """
    count, url_bytes, tokens, remote = 0, 0, 0, list[RemoteImage]()
    for field, part in _parts(_read(body)):
        count += 1
        if count > limits.max_images:
            raise ApiError(
                400, "too_many_images", f"the request has more than {limits.max_images} images; send fewer", param=field
            )
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
                    "the image has an http(s) URL, and this gateway fetches no images; send data:image/png;base64,DATA",
                )
                raise problem.api_error(count, field)
            remote.append(RemoteImage(count, url, detail))
        else:
            raise ImageProblem("invalid_image_url", "the image URL must be a data URL or an http(s) URL").api_error(
                count, field
            )
        tokens += image_tokens(url, detail)
    return CheckedImages(PromptImages(count, url_bytes, tokens), tuple(remote))


def replace_urls(body: bytes, data_urls: Mapping[str, str]) -> bytes:
    """Return the body with http(s) URLs of images replaced by data URLs.

    Args:
        body: request body that `check_images` has accepted.
        data_urls: data URL of each fetched image by http(s) URL. Image URLs that are not in it stay.
    """
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
    """Yield each image part of a chat or Responses request with its JSON path."""
    for name in _CONVERSATIONS:
        items = body.get(name)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            for key in _CONTENTS if isinstance(item, dict) else ():
                content = item.get(key)
                # OpenAI's computer tool returns one image instead of a list of parts.
                if isinstance(content, dict) and "image_url" in content:
                    yield f"{name}.{index}.{key}", content
                for position, part in enumerate(content if isinstance(content, list) else ()):
                    if isinstance(part, dict) and _is_image(part):
                        yield f"{name}.{index}.{key}.{position}", part


def _is_image(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return "image_url" in part or (isinstance(kind, str) and kind in IMAGE_PARTS)


def _checked_url(part: Mapping[str, Any], field: str, number: int) -> tuple[str, str | None]:
    """Check an image part, and return its URL, and its `detail` or None if absent."""
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
            f"image {number} of the request is a stored file, and helexa stores no files; send the image as a data URL",
        )
    raise invalid_body(f"{field}: must have an 'image_url'", field)


_LARGE_BYTES = 4 << 20


@dataclass(frozen=True)
class PreparedBody:
    """A request body with data URLs instead of http(s) URLs, and its images."""

    body: bytes
    images: PromptImages = NO_IMAGES


class ImagePreparation:
    """Checks the images of requests, and replaces image URLs by fetched images."""

    def __init__(self, settings: ImagesSection, body_workers: BodyWorkers, bodies: BodyBudget) -> None:
        self._settings = settings  # the limits, and the hosts from which images are fetched
        self._fetcher = ImageFetcher(settings)
        self._body_workers = body_workers  # worker processes for large request bodies
        self._bodies = bodies  # the memory limit for request bodies

    def configure(self, settings: ImagesSection) -> None:
        """Apply changed settings of the table `[images]`."""
        self._settings = self._fetcher.settings = settings

    @asynccontextmanager
    async def prepared(
        self, body: bytes, model: str, *, sees_images: bool | None, max_body_bytes: int
    ) -> AsyncIterator[PreparedBody]:
        """Yield the body with fetched images as data URLs; free their memory at the end.

        Args:
            sees_images: whether the model accepts images. None if unknown.
            max_body_bytes: maximum length of the body with the data URLs of all images.

        Raises:
            ApiError: 400 `vision_unsupported`: the request has images, and `model` accepts none. Also the errors of
                `check_images` and `ImageFetcher.fetch`.
        """
        if not has_media(body):
            yield PreparedBody(body)
            return
        large, settings = is_large(body), self._settings
        if sees_images is False:
            if await self._body_workers.run_if(large, count_images, body):
                raise vision_unsupported(model)
            yield PreparedBody(body)
            return
        limits = ImageLimits(settings.max_images, settings.max_bytes, bool(settings.allowed_hosts))
        checked = await self._body_workers.run_if(large, check_images, body, limits)
        memory, images = FetchMemory(self._bodies, max_body_bytes - len(body)), checked.images
        try:
            if checked.remote:
                numbers = {image.url: image.number for image in reversed(checked.remote)}
                data_urls = await self._fetcher.fetch(numbers, memory)
                fetched_bytes = sum(len(data_urls[image.url]) for image in checked.remote)
                # The fetcher has reserved memory once for each URL, but an image may occur several times in the body.
                memory.reserve(fetched_bytes - sum(map(len, data_urls.values())))
                large = large or fetched_bytes > _LARGE_BYTES
                body = await self._body_workers.run_if(large, replace_urls, body, data_urls)
                images = PromptImages(
                    images.count,
                    images.url_bytes + fetched_bytes,
                    images.tokens + sum(_added_tokens(image, data_urls[image.url]) for image in checked.remote),
                )
            yield PreparedBody(body, images)
        finally:
            memory.release()


def _added_tokens(image: RemoteImage, data_url: str) -> int:
    """Return by how much the estimated tokens of an image grow when its size is known."""
    return image_tokens(data_url, image.detail) - image_tokens(image.url, image.detail)
