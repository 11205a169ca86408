"""The edges of a gateway, over real sockets: who is counted, what is named, and what pages may ask."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from cortex import fake_node
from cortex.fake_node import FakeNode
from cortex.running import Cortex, eventually, running_cortex

CHAT = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://chat.example"


@pytest.fixture
async def edged(node: FakeNode) -> AsyncIterator[Cortex]:
    """A gateway that requires keys, whose one key may ask twice at a time, and that a page may call."""
    keys = [{"key": "two", "account_id": "a", "concurrency": 2}]
    settings = {"entitlements": {"require_auth": True, "keys": keys}, "gateway": {"cors_origins": [PAGE]}}
    async with running_cortex(node, settings=settings) as cortex:
        yield cortex


def chat(cortex: Cortex, stream: bool = True, **headers: str) -> "aiohttp.client._RequestContextManager":
    named = {"authorization": "Bearer two"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return cortex.client.post(f"{cortex.url}/v1/chat/completions", json=CHAT | {"stream": stream}, headers=named)


@pytest.mark.parametrize(
    "speak",
    [
        fake_node.respond,
        fake_node.fail_within_a_stream,
        fake_node.die_within_an_event,
        fake_node.die_within_json,
        fake_node.die_before_the_first_byte,
    ],
)
async def test_a_request_that_ended_in_any_way_runs_no_more(
    edged: Cortex, node: FakeNode, speak: fake_node.Speak
) -> None:
    node.speak = speak
    for _ in range(5):
        try:
            async with chat(edged) as response:
                await response.read()
                assert response.status != 429
        except aiohttp.ClientPayloadError:
            pass  # the answer broke off, as it should


async def test_who_hangs_up_makes_room(edged: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.never_end
    for _ in range(3):
        async with chat(edged) as one, chat(edged) as two:
            assert (one.status, two.status) == (200, 200)
            async with chat(edged) as refused:
                assert (refused.status, refused.headers["retry-after"]) == (429, "1")
                assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
            one.close()
            two.close()
        await eventually(lambda: node.speaking == 0)

        async def has_room() -> bool:
            async with chat(edged) as response:
                ended = response.status == 200
                response.close()
            return ended

        await eventually(has_room)
        await eventually(lambda: node.speaking == 0)
        await eventually(lambda: edged.gateway.ledger.open == 0)


async def test_many_at_once_are_never_more_than_two(edged: Cortex, node: FakeNode) -> None:
    most = 0

    async def speak(node: FakeNode, request: object) -> fake_node.web.StreamResponse:
        nonlocal most
        most = max(most, node.speaking)
        await asyncio.sleep(0)
        return fake_node.web.Response(body=fake_node.COMPLETION, content_type="application/json")

    async def status() -> int:
        async with chat(edged, stream=False) as response:
            await response.read()
            return response.status

    node.speak = speak
    statuses = await asyncio.gather(*(status() for _ in range(40)))
    assert set(statuses) == {200, 429}
    assert most <= 2


async def test_a_request_has_a_name_from_end_to_end(edged: Cortex, node: FakeNode) -> None:
    async with chat(edged, x_request_id="mine-1") as response:
        assert response.headers["x-request-id"] == "mine-1"
    async with chat(edged, x_request_id="not mine") as response:
        assert response.headers["x-request-id"].isalnum()
    async with chat(edged, authorization="Bearer other", x_request_id="mine-2") as response:
        assert (response.status, response.headers["x-request-id"]) == (401, "mine-2")


async def test_compressed_bodies_are_refused(edged: Cortex, node: FakeNode) -> None:
    async with chat(edged, content_encoding="gzip") as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "unsupported_content_encoding"
    assert node.bodies == []


async def test_a_page_asks_before_it_has_a_key(edged: Cortex, node: FakeNode) -> None:
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with edged.client.options(f"{edged.url}/v1/chat/completions", headers=preflight) as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, PAGE)
    async with chat(edged, origin=PAGE, authorization="Bearer other") as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (401, PAGE)
    async with chat(edged, origin=PAGE) as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, PAGE)


async def test_a_node_lets_no_page_read(edged: Cortex, node: FakeNode) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        marks = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Credentials": "true"}
        return web.json_response({}, headers=marks)

    node.speak = speak
    async with chat(edged, stream=False, origin="https://evil.example") as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("access-control-allow")]


async def test_no_page_may_ask_by_default(cortex: Cortex) -> None:
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with cortex.client.options(f"{cortex.url}/v1/chat/completions", headers=preflight) as response:
        assert response.status == 403
        assert "access-control-allow-origin" not in response.headers
