"""Replies leave nothing behind that only the collector would find."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from helexa.core.errors import ApiError, service_unavailable
from helexa.neuron.events import Finished, InferenceEvent, Started, TextDelta
from helexa.neuron.routes.completions import CompletionProjector
from helexa.neuron.routes.reply import Reply


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def _events(refused: bool) -> AsyncGenerator[InferenceEvent, None]:
    if refused:
        raise service_unavailable("not now", retry_after=1)
    yield Started(prompt_tokens=1)
    yield TextDelta("yes")
    yield Finished(reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1, prefill_ms=1.0, decode_ms=1.0)


async def _serve(refused: bool, stream: bool) -> "weakref.ref[Reply]":
    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    async def send(message: Any) -> None:
        pass

    reply = Reply(_events(refused), CompletionProjector("m"), stream=stream)
    try:
        await reply({"type": "http", "path": "/v1/completions"}, receive, send)
        assert not refused
    except ApiError:
        assert refused
    return weakref.ref(reply)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_leaves_no_cycle(refused: bool, stream: bool) -> None:
    assert (await _serve(refused, stream))() is None
