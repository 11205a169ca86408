"""Requests whose body is incomplete: rate limits and the memory budget."""

import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.raw_http import connected, read_response
from cortex.running_gateway import Cortex, eventually, running_cortex

HEAD = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sesame\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
PATHS = (b"/v1/chat/completions", b"/v1/messages", b"/v1/messages/count_tokens")


def with_key(**terms: int) -> dict[str, Any]:
    return {"entitlements": {"require_auth": True, "keys": [{"key": "sesame", "account_id": "a", **terms}]}}


def running_requests(cortex: Cortex) -> int:
    return sum(meter.running for _, meter in cortex.gateway.rate_limiter._usage_by_key.values())


@pytest.mark.parametrize("path", PATHS)
async def test_concurrency_limit_counts_a_request_whose_body_is_incomplete(node: FakeNode, path: bytes) -> None:
    async with running_cortex(node, settings=with_key(concurrency=1)) as cortex:
        async with connected(cortex) as (_, first), connected(cortex) as (reader, second):
            first.write(HEAD % (path, 100) + b"{")
            await eventually(lambda: running_requests(cortex) == 1)
            second.write(HEAD % (path, 100) + b"{")
            status, headers, body = await read_response(reader)
        assert (status, headers[b"retry-after"]) == (429, b"1")
        assert "1 requests at a time" in json.loads(body)["error"]["message"]
        await eventually(lambda: running_requests(cortex) == 0)
    assert node.bodies == []


@pytest.mark.parametrize("path", PATHS)
async def test_requests_per_minute_count_a_request_before_its_body_arrives(node: FakeNode, path: bytes) -> None:
    async with running_cortex(node, settings=with_key(requests_per_minute=1)) as cortex:
        async with connected(cortex) as (_, first):
            first.write(HEAD % (path, 100) + b"{")
            await eventually(lambda: running_requests(cortex) == 1)
        await eventually(lambda: running_requests(cortex) == 0)
        async with connected(cortex) as (reader, second):
            second.write(HEAD % (path, 100) + b"{")
            status, _, body = await read_response(reader)
        assert status == 429
        assert "1 requests a minute" in json.loads(body)["error"]["message"]


async def test_next_request_after_a_rejection_before_the_body_arrived_is_served(node: FakeNode) -> None:
    body = b'{"model":"Org/M","messages":[]}'
    async with (
        running_cortex(node, settings=with_key(concurrency=1)) as cortex,
        connected(cortex) as (reader, writer),
        connected(cortex) as (_, blocker),
    ):
        blocker.write(HEAD % (PATHS[0], 100))
        await eventually(lambda: running_requests(cortex) == 1)
        writer.write(HEAD % (PATHS[0], len(body)))
        assert (await read_response(reader))[0] == 429
        blocker.close()
        await eventually(lambda: running_requests(cortex) == 0)
        writer.write(body + HEAD % (PATHS[0], len(body)) + body)
        assert (await read_response(reader))[0] == 200
    assert node.bodies == [body]


async def test_request_bodies_above_the_memory_budget_get_a_retryable_503(node: FakeNode) -> None:
    settings = with_key() | {"gateway": {"max_body_mb": 1, "max_body_memory_mb": 4}}
    size = 1 << 20
    async with AsyncExitStack() as stack:
        cortex = await stack.enter_async_context(running_cortex(node, settings=settings))
        for count in (1, 2):
            _, writer = await stack.enter_async_context(connected(cortex))
            writer.write(HEAD % (PATHS[0], size) + b"{")
            await eventually(lambda count=count: cortex.gateway.bodies.reserved == count * size)
        for path in PATHS:
            reader, writer = await stack.enter_async_context(connected(cortex))
            writer.write(HEAD % (path, size) + b"{")
            status, headers, body = await read_response(reader)
            assert (status, headers[b"retry-after"]) == (503, b"2"), path
            assert "requests in progress would exceed" in json.loads(body)["error"]["message"]
    assert cortex.gateway.bodies.reserved == 0
