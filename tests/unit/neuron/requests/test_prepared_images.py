"""The images of one request are prepared two at a time, and their order and errors are as if one after another."""

import asyncio
import base64
from types import SimpleNamespace
from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.core.wire.openai_chat import ChatMessage
from helexa.neuron.requests.prompt_images_and_thinking import prepared_images
from helexa.neuron.vision.image_tokens_and_errors import ImageError

SECONDS = 20.0


class Vision:
    """Image workers that prepare an image when the test calls `finish`."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.running: dict[str, asyncio.Future[None]] = {}
        self.most = 0

    async def prepare(self, data: bytes, detail: str) -> str:
        name = data.decode()
        self.running[name] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.running))
        self.started.put_nowait(name)
        try:
            await self.running[name]
        finally:
            del self.running[name]
        return name.upper()

    async def next(self) -> str:
        """Return the next image whose preparation starts."""
        return await asyncio.wait_for(self.started.get(), SECONDS)

    def finish(self, name: str, error: str = "") -> None:
        """End the preparation of an image, with an error if `error` is not empty."""
        if error:
            self.running[name].set_exception(ImageError(error))
        else:
            self.running[name].set_result(None)


def message(names: str) -> ChatMessage:
    urls = [f"data:image/png;base64,{base64.b64encode(name.encode()).decode()}" for name in names]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return ChatMessage(role="user", content=parts)  # type: ignore[arg-type]


def preparing(vision: Vision, names: str) -> asyncio.Task[Any]:
    model = SimpleNamespace(vision=vision, id="model")
    return asyncio.create_task(prepared_images(model, [message(names)]))  # type: ignore[arg-type]


async def test_images_of_a_request_are_prepared_two_at_a_time_and_keep_their_order() -> None:
    vision = Vision()
    images = preparing(vision, "abcde")
    assert {await vision.next(), await vision.next()} == {"a", "b"}
    vision.finish("b")
    assert await vision.next() == "c"
    vision.finish("c")
    assert await vision.next() == "d"
    vision.finish("a")
    assert await vision.next() == "e"
    vision.finish("e")
    vision.finish("d")
    assert await asyncio.wait_for(images, SECONDS) == ["A", "B", "C", "D", "E"]
    assert vision.most == 2


async def test_error_of_the_first_broken_image_is_reported_and_no_further_image_starts() -> None:
    vision = Vision()
    images = preparing(vision, "abcde")
    await vision.next(), await vision.next()
    vision.finish("b", "second")
    await asyncio.sleep(0)
    vision.finish("a", "first")
    with pytest.raises(ApiError, match=r"messages\.0\.content\.0.*first"):
        await asyncio.wait_for(images, SECONDS)
    assert vision.started.empty()


async def test_cancellation_of_a_request_ends_the_preparation_of_its_images() -> None:
    vision = Vision()
    images = preparing(vision, "abcd")
    await vision.next(), await vision.next()
    images.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(images, SECONDS)
    assert not vision.running
    assert vision.started.empty()
