"""Prepares the images of a request: checks them, and fetches the images that have http(s) URLs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from helexa.core.errors import vision_unsupported
from helexa.cortex.config import ImagesSection
from helexa.cortex.images.image_fetcher import FetchMemory, ImageFetcher
from helexa.cortex.images.request_images import ImageLimits, RemoteImage, check_images, count_images, replace_urls
from helexa.cortex.requests.body_workers import BodyWorkers, is_large
from helexa.cortex.usage.image_tokens import image_tokens
from helexa.cortex.usage.media_tokens import NO_IMAGES, PromptImages, has_media
from helexa.http.body_budget import BodyBudget

_LARGE_BYTES = 4 << 20


@dataclass(frozen=True)
class PreparedBody:
    """A request body with data URLs instead of http(s) URLs, and its images."""

    body: bytes
    images: PromptImages = NO_IMAGES


class ImagePreparation:
    """Prepares the images of requests.

    Args:
        settings: the limits, and the hosts from which images are fetched.
        body_workers: worker processes for large request bodies.
        bodies: the memory limit for request bodies.
    """

    def __init__(self, settings: ImagesSection, body_workers: BodyWorkers, bodies: BodyBudget) -> None:
        self._settings = settings
        self._fetcher = ImageFetcher(settings)
        self._body_workers = body_workers
        self._bodies = bodies

    def configure(self, settings: ImagesSection) -> None:
        """Apply new settings."""
        self._settings = self._fetcher.settings = settings

    @asynccontextmanager
    async def prepared(
        self, body: bytes, model: str, *, sees_images: bool | None, max_body_bytes: int
    ) -> AsyncIterator[PreparedBody]:
        """Prepare the images of a request body. The memory of fetched images is released at the end of the block.

        Args:
            body: the request body.
            model: id of the model, for the error message.
            sees_images: whether the model accepts images. None if unknown.
            max_body_bytes: maximum length of the body with the data URLs of all images.

        Raises:
            ApiError: 400 `vision_unsupported`: the request has images, and the model accepts no images. Other errors
                are those of `check_images` and `ImageFetcher.fetch`.
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
                memory.reserve(fetched_bytes - sum(map(len, data_urls.values())))  # an image may occur several times
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
