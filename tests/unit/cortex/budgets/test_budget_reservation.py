"""Budget reservations near the cap, and charges when a node's usage is missing or too large."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from cortex.fake_node import COMPLETION, DONE, FakeNode, begin, chunk
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.cortex.ledger.leases_windows_and_over_budget import Reservation

CAP = 2000
LARGE = {"key": "large", "account_id": "acme", "key_id": "large", "hard_cap": 1_000_000}
KEYS = [{"key": "small", "account_id": "acme", "key_id": "small", "hard_cap": CAP}, LARGE]
LONG = [{"role": "user", "content": "x" * 3000}]  # more bytes than the cap has tokens
SHORT = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def keyed(node: FakeNode, kind: str = "neuron") -> AsyncIterator[Cortex]:
    neurons = [{"name": "n1", "endpoint": node.url, "kind": kind}]
    async with running_cortex(node, settings={"neurons": neurons, "entitlements": {"keys": KEYS}}) as cortex:
        yield cortex


async def post(cortex: Cortex, key: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": "Org/M", "messages": SHORT} | fields
    headers = {"authorization": f"Bearer {key}"}
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, await (response.read() if fields.get("stream") else response.json())


async def spent(cortex: Cortex, key: str) -> int:
    """Return the tokens charged to a key after every reservation is settled."""
    ledger = cortex.gateway.ledger
    await eventually(lambda: not ledger.open)
    principal = next(entry.principal for entry in cortex.gateway.authenticator.static if entry.principal.key_id == key)
    return (await ledger.budget(principal)).spent


def tokenizing(count: int) -> Any:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"count": count, "max_model_len": 4096, "tokens": []})
        return web.Response(body=COMPLETION, content_type="application/json")

    return speak


async def test_prompt_tokens_are_counted_by_the_node_if_the_estimate_exceeds_the_budget(node: FakeNode) -> None:
    node.speak = tokenizing(750)
    async with keyed(node) as cortex:
        assert (await post(cortex, "small", messages=LONG, max_tokens=1000))[0] == 200
        status, body = await post(cortex, "small", messages=LONG, max_tokens=1200)
        assert (status, body["error"]["tokens_left"]) == (429, CAP - 9)
        assert "this request may use 2014" in body["error"]["message"]
    assert [json.loads(body).get("max_tokens") for body in node.bodies] == [1000, 1000, 1200]


async def test_request_for_more_output_than_the_budget_is_rejected_without_calling_a_node(node: FakeNode) -> None:
    async with keyed(node) as cortex:
        assert (await post(cortex, "small", max_tokens=CAP))[0] == 429
    assert node.bodies == []


async def test_request_without_an_output_limit_is_limited_to_the_remaining_budget(node: FakeNode) -> None:
    node.speak = tokenizing(36)
    async with keyed(node) as cortex:
        assert (await post(cortex, "small"))[0] == 200
        assert json.loads(node.bodies[-1])["max_tokens"] == CAP - 100
        assert (await post(cortex, "small", n=8))[0] == 429  # each choice's limit would be too small
        assert (await post(cortex, "large"))[0] == 200
        assert json.loads(node.bodies[-1])["max_tokens"] == 8192


TEXT = " ".join(["word"] * 5000)


@pytest.mark.parametrize("cut", [None, 1000])
async def test_streamed_output_without_usage_is_estimated_from_its_bytes(node: FakeNode, cut: int | None) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        stream = chunk(TEXT[:9]) + chunk(TEXT[9:]) + DONE
        return await begin(
            request, *(stream[at : at + (cut or len(stream))] for at in range(0, len(stream), cut or 1 << 20))
        )

    node.speak = speak
    async with keyed(node, "openai") as cortex:
        assert (await post(cortex, "large", stream=True, max_tokens=50_000))[0] == 200
        assert 5000 <= await spent(cortex, "large") <= 6600
        assert (await post(cortex, "small", stream=True, max_tokens=500))[0] == 200
        assert await spent(cortex, "small") <= len(json.dumps(SHORT)) + 1200


async def test_estimated_usage_is_charged_before_the_client_gets_the_end_of_the_stream(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        choice = {"index": 0, "delta": {"content": TEXT}, "finish_reason": "stop"}
        return await begin(request, b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode(), b"data: [DONE]\n\n")

    settle, charging, may_charge = Reservation.settle, asyncio.Event(), asyncio.Event()

    async def held(reservation: Reservation, *counts: int, **facts: Any) -> None:
        charging.set()
        await may_charge.wait()
        await settle(reservation, *counts, **facts)

    monkeypatch.setattr(Reservation, "settle", held)
    node.speak = speak
    async with keyed(node, "openai") as cortex:
        asking = asyncio.create_task(post(cortex, "large", stream=True, max_tokens=50_000))
        await charging.wait()
        assert await asyncio.wait({asking}, timeout=0.2) == (set(), {asking})
        may_charge.set()
        assert (await asking)[1].endswith(DONE)
        assert 5000 <= await spent(cortex, "large") <= 6600


async def test_non_streaming_output_without_usage_is_estimated_from_its_bytes(node: FakeNode) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}}]})

    node.speak = speak
    async with keyed(node, "openai") as cortex:
        assert (await post(cortex, "large", max_tokens=50_000))[0] == 200
        assert 5000 <= await spent(cortex, "large") <= 6600


async def test_usage_above_the_reservation_is_charged_only_up_to_the_reservation(node: FakeNode) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 100, "completion_tokens": 1 << 40}
        return web.json_response({"choices": [], "usage": usage})

    node.speak = speak
    async with keyed(node) as cortex:
        assert (await post(cortex, "small", max_tokens=10))[0] == 200
        charged = await spent(cortex, "small")
        assert 100 < charged <= CAP
        (row,) = await cortex.gateway.ledger.recent(1)
        assert row["completion"] > CAP  # the node's reported usage
