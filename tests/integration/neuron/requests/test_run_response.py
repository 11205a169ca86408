"""When response streams begin, and that responses leave no reference cycles."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from helexa.core.errors import ApiError, service_unavailable
from helexa.core.sse import KEEP_ALIVE, EventParser
from helexa.neuron.admission import Admission
from helexa.neuron.config import AdmissionConfig
from helexa.neuron.output_events import Finished, InferenceEvent, Started, TextDelta
from helexa.neuron.routes import replies_disconnects_and_errors
from helexa.neuron.routes.completions import CompletionProjector
from helexa.neuron.routes.replies_disconnects_and_errors import RunResponse
from neuron.scripted_engine import MODEL, answer
from neuron.scripted_node import CHAT, serve


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


async def _serve(refused: bool, stream: bool) -> "weakref.ref[RunResponse]":
    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    async def send(message: Any) -> None:
        pass

    response = RunResponse(_events(refused), CompletionProjector("m"), stream=stream)
    try:
        await response({"type": "http", "path": "/v1/completions"}, receive, send)
        assert not refused
    except ApiError:
        assert refused
    return weakref.ref(response)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_response_object_is_freed_without_the_garbage_collector(refused: bool, stream: bool) -> None:
    assert (await _serve(refused, stream))() is None


@asynccontextmanager
async def _waiting(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], **limits: float
) -> AsyncIterator[tuple[aiohttp.ClientResponse, AsyncExitStack]]:
    """Yield a stream that waits for the only slot of the batch, and the exit stack that holds the slot."""
    monkeypatch.setattr(replies_disconnects_and_errors, "FIRST_EVENT_SECONDS", 0.01)
    async with serve(answer("at last")) as node:
        admission = Admission(AdmissionConfig(max_in_flight=1, **limits), node.model.engine)  # type: ignore[arg-type]
        node.model.admission = admission
        async with AsyncExitStack() as slot:
            await slot.enter_async_context(admission.admit("", 1, 1))
            async with node.http.post(f"{node.url}{path}", json={**body, "stream": True}) as response:
                yield response, slot


async def test_stream_that_waits_for_admission_begins_with_a_keep_alive_comment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _waiting(monkeypatch, "/v1/chat/completions", CHAT) as (response, slot):
        assert response.status == 200
        assert await response.content.readline() == KEEP_ALIVE.splitlines(keepends=True)[0]
        await slot.aclose()
        *chunks, done = [event.data for event in EventParser().feed(await response.content.read())]
    deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert "".join([delta.get("content", "") for delta in deltas]) == "at last"
    assert (deltas[0], done) == ({"role": "assistant"}, "[DONE]")


async def test_rejection_after_the_stream_has_begun_is_sent_as_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _waiting(monkeypatch, "/v1/chat/completions", CHAT, max_wait_secs=0.1) as (response, _):
        failure, done = EventParser().feed(await response.content.read())
    assert (json.loads(failure.data)["error"]["code"], done.data) == ("rate_limit_exceeded", "[DONE]")


async def test_rejection_after_a_responses_stream_has_begun_is_a_failed_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request_body = {"model": MODEL, "input": "hi"}
    async with _waiting(monkeypatch, "/v1/responses", request_body, max_wait_secs=0.1) as (response, _):
        events = EventParser().feed(await response.content.read())
    error, failed = [json.loads(event.data) for event in events]
    assert (error["type"], error["sequence_number"]) == ("error", 0)
    assert (failed["type"], failed["response"]["status"], failed["response"]["output"]) == (
        "response.failed",
        "failed",
        [],
    )
