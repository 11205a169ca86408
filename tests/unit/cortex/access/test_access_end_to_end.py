"""Concurrency limits, request ids and CORS of a whole gateway, over real sockets."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from cortex import fake_node
from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex

CHAT = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://chat.example"


@pytest.fixture
async def limited(node: FakeNode) -> AsyncIterator[Cortex]:
    """A gateway that requires keys: one key with a concurrency of 2, and one allowed CORS origin."""
    keys = [{"key": "two", "account_id": "a", "concurrency": 2}]
    settings = {"entitlements": {"require_auth": True, "keys": keys}, "gateway": {"cors_origins": [PAGE]}}
    async with running_cortex(node, settings=settings) as cortex:
        yield cortex


def chat(cortex: Cortex, stream: bool = True, **headers: str) -> "aiohttp.client._RequestContextManager":
    auth = {"authorization": "Bearer two"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return cortex.client.post(f"{cortex.url}/v1/chat/completions", json=CHAT | {"stream": stream}, headers=auth)


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
async def test_request_that_has_ended_frees_the_concurrency_slot_of_its_key(
    limited: Cortex, node: FakeNode, speak: fake_node.Speak
) -> None:
    node.speak = speak
    for _ in range(5):
        try:
            async with chat(limited) as response:
                await response.read()
                assert response.status != 429
        except aiohttp.ClientPayloadError:
            pass  # expected: the response broke off


async def test_disconnect_of_a_client_frees_the_concurrency_slot_of_its_key(limited: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.never_end
    for _ in range(3):
        async with chat(limited) as first, chat(limited) as second:
            assert (first.status, second.status) == (200, 200)
            async with chat(limited) as refused:
                assert (refused.status, refused.headers["retry-after"]) == (429, "1")
                assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
            first.close()
            second.close()
        await eventually(lambda: node.speaking == 0)

        async def admits_again() -> bool:
            async with chat(limited) as response:
                ended = response.status == 200
                response.close()
            return ended

        await eventually(admits_again)
        await eventually(lambda: node.speaking == 0)
        await eventually(lambda: limited.gateway.ledger.open == 0)


async def test_concurrency_limit_of_a_key_holds_for_many_requests(limited: Cortex, node: FakeNode) -> None:
    highest = 0

    async def speak(node: FakeNode, request: object) -> fake_node.web.StreamResponse:
        nonlocal highest
        highest = max(highest, node.speaking)
        await asyncio.sleep(0)
        return fake_node.web.Response(body=fake_node.COMPLETION, content_type="application/json")

    async def status() -> int:
        async with chat(limited, stream=False) as response:
            await response.read()
            return response.status

    node.speak = speak
    statuses = await asyncio.gather(*(status() for _ in range(40)))
    assert set(statuses) == {200, 429}
    assert highest <= 2


async def test_request_id_is_returned_in_the_response(limited: Cortex, node: FakeNode) -> None:
    async with chat(limited, x_request_id="mine-1") as response:
        assert response.headers["x-request-id"] == "mine-1"
    async with chat(limited, x_request_id="not mine") as response:
        assert response.headers["x-request-id"].isalnum()
    async with chat(limited, authorization="Bearer other", x_request_id="mine-2") as response:
        assert (response.status, response.headers["x-request-id"]) == (401, "mine-2")


@pytest.mark.parametrize(
    ("encoding", "status", "code"),
    [("br", 415, "unsupported_content_encoding"), ("gzip", 400, "invalid_content_encoding")],
)
async def test_request_bodies_in_an_unknown_or_false_content_encoding_are_rejected(
    limited: Cortex, node: FakeNode, encoding: str, status: int, code: str
) -> None:
    async with chat(limited, content_encoding=encoding) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)
    assert node.bodies == []


async def test_cors_preflight_needs_no_api_key(limited: Cortex, node: FakeNode) -> None:
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with limited.client.options(f"{limited.url}/v1/chat/completions", headers=preflight) as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, PAGE)
    async with chat(limited, origin=PAGE, authorization="Bearer other") as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (401, PAGE)
    async with chat(limited, origin=PAGE) as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, PAGE)


async def test_cors_headers_in_a_node_response_are_not_forwarded(limited: Cortex, node: FakeNode) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        cors_headers = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Credentials": "true"}
        return web.json_response({}, headers=cors_headers)

    node.speak = speak
    async with chat(limited, stream=False, origin="https://evil.example") as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("access-control-allow")]


async def test_cors_preflight_is_rejected_by_default(cortex: Cortex) -> None:
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with cortex.client.options(f"{cortex.url}/v1/chat/completions", headers=preflight) as response:
        assert response.status == 403
        assert "access-control-allow-origin" not in response.headers
