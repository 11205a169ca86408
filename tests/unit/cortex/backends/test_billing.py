"""Charges for answers of backends that report their token counts in other ways, or not at all."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from emulator.backend import Backend
from emulator.message_quirks import USAGE
from emulator.quirk import Quirk
from emulator.table import QUIRKS

from cortex.fake_node import CHOICE, FakeNode
from cortex.running_gateway import Cortex, running_cortex

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTED = {name: quirk for name, quirk in QUIRKS.items() if quirk in USAGE}
KEYS = [{"key": name, "account_id": name, "key_id": name, "hard_cap": 10**6} for name in COUNTED]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cortex() -> AsyncIterator[Cortex]:
    async with Backend(QUIRKS).serving() as backend:
        settings = {
            "neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}],
            "entitlements": {"keys": KEYS},
        }
        async with running_cortex(FakeNode(url=backend.url), settings=settings, poll_interval_secs=5) as cortex:
            yield cortex


async def charge(cortex: Cortex, name: str, body: dict[str, Any]) -> float:
    """Send a request with the key `name`, and return what it was charged."""
    before = await cortex.sample("cortex_spend_tokens_total", account=name, key=name)
    headers = {"authorization": f"Bearer {name}"}
    request = {"model": name, "messages": [{"role": "user", "content": "Hi"}], **body}
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=request, headers=headers) as response:
        assert response.status == 200
        await response.read()
    return await cortex.sample("cortex_spend_tokens_total", account=name, key=name) - before


WHOLE = [name for name, quirk in COUNTED.items() if quirk.whole is not None]


def check(quirk: Quirk, charged: float) -> None:
    if quirk.seen.usage is not None:
        assert charged == sum(quirk.seen.usage)
    else:
        assert charged > 7  # more than a count that the backend reports for prompt or answer alone


def shown(name: str) -> str:
    return str(QUIRKS[name])


@pytest.mark.parametrize("name", COUNTED, ids=shown)
async def test_prompt_and_answer_tokens_of_a_backend_stream_are_charged(cortex: Cortex, name: str) -> None:
    check(QUIRKS[name], await charge(cortex, name, {"stream": True}))


@pytest.mark.parametrize("name", WHOLE, ids=shown)
async def test_prompt_and_answer_tokens_of_a_non_streaming_backend_answer_are_charged(
    cortex: Cortex, name: str
) -> None:
    check(QUIRKS[name], await charge(cortex, name, {}))


COUNTS: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}
RESPONSE_COUNTS: dict[str, Any] = {
    "input_tokens": 100,
    "output_tokens": 2,
    "input_tokens_details": {"cached_tokens": 80},
}


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        (COUNTS | {"prompt_cache_hit_tokens": 80, "prompt_cache_miss_tokens": 20}, 80),
        (COUNTS | {"cached_tokens": 80}, 80),
        (COUNTS | {"cached_tokens": 80, "prompt_tokens_details": {"audio_tokens": 1}}, 80),
        (RESPONSE_COUNTS, 80),
        (COUNTS | {"cached_tokens": 80, "prompt_tokens_details": {"cached_tokens": 0}}, 0),  # OpenAI's field counts
        (COUNTS | {"prompt_cache_hit_tokens": 900}, 100),
    ],
    ids=["DeepSeek", "Moonshot", "other details", "Responses", "OpenAI", "too many"],
)
async def test_cached_token_count_of_any_backend_gets_the_field_name_of_the_clients_api(
    usage: dict[str, Any], cached: int
) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "c1", "choices": [CHOICE], "usage": usage})

    async with FakeNode(speak=speak).holds("Org/M").serving() as backend:
        settings = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            body = {"model": "Org/M", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
            async with cortex.client.post(f"{cortex.url}/v1/messages", json=body) as response:
                shown = (await response.json())["usage"]
            assert (shown["input_tokens"], shown["cache_read_input_tokens"]) == (100 - cached, cached)
            async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body) as response:
                shown = (await response.json())["usage"]
            assert (shown["prompt_tokens"], shown.get("prompt_tokens_details", {}).get("cached_tokens", 0)) == (
                100,
                cached,
            )
