"""Nodes that send nothing for longer than the idle timeout. The gateway waits only for live nodes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from cortex import fake_node
from cortex.fake_node import DONE, STREAM, FakeNode, event
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.cortex.upstream import connection_and_timeouts
from helexa.cortex.upstream.connection_and_timeouts import Timeouts

STOP = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
KEY = {"key": "k", "account_id": "acme", "key_id": "k", "hard_cap": 100_000}


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_and_timeouts, "_RECHECK_SECS", 0.01)


@asynccontextmanager
async def serving(node: FakeNode, **timeouts: float) -> AsyncIterator[Cortex]:
    """Run a gateway that requires `KEY`, with `timeouts` in its `[gateway]` section."""
    settings = {"gateway": timeouts, "entitlements": {"require_auth": True, "keys": [KEY]}}
    async with running_cortex(node, settings=settings) as cortex:
        yield cortex


async def ask(cortex: Cortex, **fields: Any) -> tuple[int, bytes]:
    body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, **fields}
    headers = {"authorization": "Bearer k"}
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.read()


async def spent(cortex: Cortex) -> int:
    [key] = cortex.gateway.authenticator.static
    return (await cortex.gateway.ledger.budget(key.principal)).spent


def code(body: bytes) -> str:
    return json.loads(body)["error"]["code"]


def count_checks(cortex: Cortex, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns how often the gateway has checked whether a silent node is alive."""
    is_alive, checks = cortex.gateway.fleet.is_alive, 0

    def counting(name: str) -> bool:
        nonlocal checks
        checks += 1
        return is_alive(name)

    monkeypatch.setattr(cortex.gateway.fleet, "is_alive", counting)
    return lambda: checks


async def answer_late(node: FakeNode, request: web.Request) -> web.StreamResponse:
    await node.go_on.wait()
    return await fake_node.respond(node, request)


async def stream_late(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Send the head at once and the first event after the prefill, as vLLM does."""
    response = await fake_node.begin(request)
    await node.go_on.wait()
    for piece in (*STREAM[:-2], STOP, *STREAM[-2:]):
        await response.write(piece)
    return response


@pytest.mark.parametrize("kind", ["neuron", "openai"])
@pytest.mark.parametrize("stream", [False, True])
async def test_slow_response_of_a_node_that_answers_polls_arrives_and_is_charged(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, stream: bool, kind: str
) -> None:
    node.speak = stream_late if stream else answer_late
    async with serving(node, idle_timeout_secs=0.05) as cortex:
        section = cortex.gateway.config.neurons[0].model_copy(update={"kind": kind})
        cortex.gateway.fleet.configure([section])
        await eventually(lambda: cortex.gateway.fleet.view().knows("Org/M"))
        checks = count_checks(cortex, monkeypatch)
        ask_task = asyncio.create_task(ask(cortex, stream=stream))
        await eventually(lambda: checks() > 2)
        node.go_on.set()
        status, body = await ask_task
        assert status == 200
        assert body.endswith(DONE) if stream else json.loads(body)["usage"]["completion_tokens"] == 2
        assert await spent(cortex) == 9


async def test_node_that_answers_neither_requests_nor_polls_is_504_and_opens_the_breaker(node: FakeNode) -> None:
    node.speak = fake_node.never_begin
    async with serving(node, idle_timeout_secs=0.05) as cortex:
        ask_task = [asyncio.create_task(ask(cortex)) for _ in range(3)]
        await eventually(lambda: node.speaking == 3)
        assert not any(task.done() for task in ask_task)
        node.down = True
        outcomes = await asyncio.gather(*ask_task)
        assert [(status, code(body)) for status, body in outcomes] == [(504, "upstream_timeout")] * 3
        assert cortex.gateway.fleet.view().is_open("n1", "Org/M", "any client")
        assert await spent(cortex) == 0


@pytest.mark.parametrize("speak", [fake_node.never_begin, fake_node.never_go_on])
async def test_timeout_at_a_node_that_answers_polls_leaves_the_breaker_closed(
    node: FakeNode, speak: fake_node.Speak
) -> None:
    node.speak = speak
    async with serving(node, answer_timeout_secs=0.2) as cortex:
        for _ in range(4):
            status, body = await ask(cortex)
            assert (status, code(body)) == (504, "upstream_timeout")
        assert not cortex.gateway.fleet.view().open
        assert len(node.bodies) == 4
        await eventually(lambda: node.speaking == 0)  # the node's requests were cancelled
        node.speak = None

        async def answers() -> bool:  # on a busy machine, an answer may take longer than the timeout
            return (await ask(cortex))[0] == 200

        await eventually(answers)


async def test_timeout_at_a_node_that_answers_polls_is_charged_the_reported_usage(node: FakeNode) -> None:
    async def generate_and_be_silent(node: FakeNode, request: web.Request) -> web.StreamResponse:
        usage_id = request.headers["x-helexa-usage-id"]
        node.usages[usage_id] = {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0}
        return await fake_node.never_begin(node, request)

    node.speak = generate_and_be_silent
    async with serving(node, answer_timeout_secs=0.2) as cortex:
        status, body = await ask(cortex)
        assert (status, code(body)) == (504, "upstream_timeout")
        assert await spent(cortex) == 7


async def test_timeout_response_of_a_proxy_leaves_the_breaker_closed(node: FakeNode) -> None:
    async def time_out(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.Response(status=504, text="<html>Gateway Timeout</html>", content_type="text/html")

    node.speak = time_out
    async with serving(node) as cortex:
        for _ in range(4):
            status, body = await ask(cortex)
            assert (status, code(body)) == (504, "upstream_timeout")
        assert not cortex.gateway.fleet.view().open


async def test_stream_that_stalls_ends_with_an_error_event(node: FakeNode) -> None:
    node.speak = fake_node.never_end
    async with serving(node, idle_timeout_secs=0.05) as cortex:
        status, body = await ask(cortex, stream=True)
        assert status == 200
        assert b'"upstream_timeout"' in body
        assert body.endswith(DONE)
        assert not cortex.gateway.fleet.view().open


async def test_non_streaming_requests_to_helexa_nodes_ask_for_interim_responses(node: FakeNode) -> None:
    ports: list[int] = []

    async def note_port(node: FakeNode, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return await fake_node.respond(node, request)

    node.speak = note_port
    async with serving(node) as cortex:
        await ask(cortex)
        await ask(cortex, stream=True)
        section = cortex.gateway.config.neurons[0].model_copy(update={"kind": "openai"})
        cortex.gateway.fleet.configure([section])
        await eventually(lambda: cortex.gateway.fleet.view().knows("Org/M"))
        await ask(cortex)
    keep_alive_headers = [headers.get("x-helexa-keep-alive") for headers in node.headers]
    assert keep_alive_headers == [f"15; from=127.0.0.1:{ports[0]}", None, None]


async def test_node_timeouts_follow_a_reload_of_the_configuration(node: FakeNode) -> None:
    async with serving(node) as cortex:
        gateway = cortex.gateway
        changed = gateway.config.gateway.model_copy(update={"idle_timeout_secs": 7.0, "answer_timeout_secs": 9.0})
        gateway.configure(gateway.config.model_copy(update={"gateway": changed}), gateway.catalog)
        assert gateway.upstream.timeouts == Timeouts(7.0, 9.0)
