"""A node that fails requests at once while its polls succeed: other nodes get its share, and clients see no failure."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain

import pytest
from aiohttp import web

from cortex import fake_node
from cortex.fake_node import FakeNode, Speak
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.cortex.fleet import ejection

ACCOUNTS = [f"account{number}" for number in range(6)]
KEYS = [{"key": f"key of {account}", "account_id": account, "role": "admin"} for account in ACCOUNTS]
REQUESTS = 60
BUSY = {"models": [{"id": "Org/M", "in_flight": 9}]}


def answering(status: int, text: str = "no") -> Speak:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": text, "type": "api_error", "code": None}}, status=status)

    return speak


async def drop(node: FakeNode, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def answer_with_an_error_event(node: FakeNode, request: web.Request) -> web.StreamResponse:
    failure = b'data: {"error":{"message":"out of memory","type":"api_error","code":null}}\n\n'
    return await fake_node.begin(request, failure, fake_node.DONE)


async def answer_with_an_error_object(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "out of memory"})


async def slow(node: FakeNode, request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(0.01)  # the load of the good node
    return await fake_node.respond(node, request)


STATUSES = (401, 403, 404, 408, 413, 429, 500, 503, 504, 529)
SICK = {f"HTTP {status}": answering(status) for status in STATUSES} | {
    "dropped connections": drop,
    "error events": answer_with_an_error_event,
    "error objects": answer_with_an_error_object,
}


@asynccontextmanager
async def two_nodes(speak: Speak | None) -> AsyncIterator[tuple[Cortex, FakeNode, FakeNode]]:
    """Run a gateway in front of a sick node and a good node. The sick node has the lower load."""
    async with (
        FakeNode("sick", speak=speak).holds("Org/M").serving() as sick,
        FakeNode("good", speak=slow, health=BUSY).holds("Org/M").serving() as good,
        running_cortex(sick, good, settings={"entitlements": {"require_auth": True, "keys": KEYS}}) as cortex,
    ):
        yield cortex, sick, good


async def ask(cortex: Cortex, account: str, *, stream: bool = False) -> int:
    body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    headers = {"authorization": f"Bearer key of {account}"}
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
        content = await response.read()
        return 599 if response.status == 200 and b'"error"' in content else response.status


async def crowd(cortex: Cortex) -> Counter[int]:
    """Send `REQUESTS` requests of six clients, each of which waits for its answer before its next request."""

    async def client(account: str) -> list[int]:
        return [await ask(cortex, account, stream=number % 2 == 0) for number in range(REQUESTS // len(ACCOUNTS))]

    return Counter(chain.from_iterable(await asyncio.gather(*map(client, ACCOUNTS))))


async def test_at_most_3_of_600_requests_fail_if_one_of_two_nodes_misbehaves() -> None:
    failures: dict[str, Counter[int]] = {}
    async with two_nodes(None) as (cortex, sick, _):
        for sickness, speak in SICK.items():
            sick.speak = speak
            failures[sickness] = await crowd(cortex) - Counter({200: REQUESTS})
            cortex.gateway.fleet.configure([])  # forgets everything about the nodes
            cortex.gateway.fleet.configure(cortex.gateway.config.neurons)
            await eventually(lambda: all(node.healthy for node in cortex.gateway.fleet.view().nodes))
    assert sum(counts.total() for counts in failures.values()) <= 3, failures


@pytest.mark.parametrize("sickness", SICK)
async def test_failing_node_gets_few_requests_after_its_first_failures(sickness: str) -> None:
    async with two_nodes(SICK[sickness]) as (cortex, sick, good):
        assert await crowd(cortex) == {200: REQUESTS}
        assert 0 < len(sick.bodies) < REQUESTS // 2
        assert len(good.bodies) == REQUESTS


async def too_long(node: FakeNode, request: web.Request) -> web.StreamResponse:
    error = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
    return web.json_response({"error": error}, status=400)


@pytest.mark.parametrize(("speak", "strikes"), [(too_long, 0), (answering(413), 2)])
async def test_prompts_too_long_for_one_node_do_not_move_other_requests_away_from_it(
    speak: Speak, strikes: int
) -> None:
    async with two_nodes(speak) as (cortex, small, _):
        for account in ACCOUNTS[:2]:
            assert await ask(cortex, account) == 200  # the other node has a longer context
        view = cortex.gateway.fleet.view()
        assert len(small.bodies) == 2
        assert view.cooling_down == frozenset()
        assert len({requester.client for _, requester in view.ejected if requester.client}) == strikes


async def ejected(cortex: Cortex) -> list[str]:
    """Return the models for which the list of nodes shows the first node as ejected."""
    headers = {"authorization": "Bearer key of account0"}
    async with cortex.client.get(f"{cortex.url}/api/nodes", headers=headers) as response:
        return (await response.json())["nodes"][0]["ejected"]


async def test_failing_node_is_shown_as_ejected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ejection, "FIRST_EJECTION_SECS", 600.0)
    async with two_nodes(answering(500)) as (cortex, sick, _):
        for account in ACCOUNTS[:2]:

            async def struck(account: str = account) -> bool:
                await ask(cortex, account)
                return any(requester.client == account for _, requester in cortex.gateway.fleet.view().ejected)

            await eventually(struck)
        assert await ejected(cortex) == ["Org/M"]
        assert len(sick.bodies) == 2  # the failures of two clients eject the node for all
        assert "model gets few requests on this node for now node=sick model=Org/M" in caplog.text
        async with cortex.client.get(cortex.metrics_url) as response:
            metrics = await response.text()
        assert 'cortex_model_avoided{model="Org/M",node="sick",reason="ejected"} 1.0' in metrics
        assert 'cortex_model_avoided{model="Org/M",node="good",reason="ejected"} 0.0' in metrics


async def test_node_that_recovers_from_failures_gets_its_share_of_requests_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ejection, "FIRST_EJECTION_SECS", 0.05)
    async with two_nodes(answering(500)) as (cortex, sick, _):
        await crowd(cortex)
        sick.speak = None
        sick.bodies.clear()

        async def returned() -> bool:  # after its ejections ended, and trials succeeded
            assert await crowd(cortex) == {200: REQUESTS}
            return len(sick.bodies) > REQUESTS // 2 and not await ejected(cortex)

        await eventually(returned)


async def test_error_caused_by_the_request_reaches_the_client_and_ejects_no_node() -> None:
    async with two_nodes(answering(500, "bad template")) as (cortex, sick, good):
        good.speak = sick.speak
        for _ in range(6):
            assert await ask(cortex, "account0") == 500
        assert len(sick.bodies) == len(good.bodies) == 6  # each request is tried on both nodes
        assert not cortex.gateway.fleet.view().ejected
        good.speak = sick.speak = answering(400)
        assert await ask(cortex, "account0") == 400
        assert len(sick.bodies + good.bodies) == 13  # another node would probably give the same error


async def test_node_that_rejects_every_request_as_invalid_is_ejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ejection, "FIRST_EJECTION_SECS", 600.0)
    text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    async with two_nodes(answering(400, text)) as (cortex, sick, _):
        outcomes = Counter([await ask(cortex, "account0") for _ in range(20)])
        assert outcomes[400] <= 2 and outcomes.total() == outcomes[200] + outcomes[400]
        assert len(sick.bodies) == 3  # the third was tried on the other node, too


async def test_prompt_that_exceeds_the_context_of_one_node_is_served_by_the_other() -> None:
    text = "This model's maximum context length is 8 tokens. However, your messages resulted in 9 tokens."
    async with two_nodes(answering(400, text)) as (cortex, sick, _):
        assert [await ask(cortex, "account0") for _ in range(10)] == [200] * 10
        assert sick.bodies


async def test_node_whose_streams_break_off_is_ejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ejection, "FIRST_EJECTION_SECS", 600.0)
    async with two_nodes(fake_node.fail_within_a_stream) as (cortex, sick, _):
        outcomes = Counter([await ask(cortex, "account0", stream=True) for _ in range(10)])
        assert outcomes[599] <= 2 and outcomes[200] >= 8
        sick.bodies.clear()
        assert await ask(cortex, "account0", stream=True) == 200
        assert not sick.bodies


async def test_client_whose_requests_crash_a_node_opens_the_breaker_for_no_other_client() -> None:
    async def drop_poison(node: FakeNode, request: web.Request) -> web.StreamResponse:
        poisoned = "account0" in str(await request.json()) or request.headers.get("x-poison")
        return await (drop if poisoned else fake_node.respond)(node, request)

    async with FakeNode(speak=drop_poison).holds("Org/M").serving() as node:
        settings = {
            "entitlements": {"require_auth": True, "keys": KEYS},
            "neurons": [{"name": "n1", "endpoint": node.url, "kind": "openai"}],
        }
        async with running_cortex(node, settings=settings) as cortex:
            body = {"model": "Org/M", "messages": [{"role": "user", "content": "account0"}]}
            headers = {"authorization": "Bearer key of account0"}
            statuses: list[int] = []
            for _ in range(5):
                async with cortex.client.post(
                    f"{cortex.url}/v1/chat/completions", json=body, headers=headers
                ) as response:
                    statuses.append(response.status)
            assert statuses == [502] * 3 + [503] * 2  # only this client has to wait
            assert [await ask(cortex, account) for account in ACCOUNTS[1:]] == [200] * 5


async def test_request_that_crashed_the_engines_of_two_nodes_is_not_sent_to_a_third() -> None:
    async def crash(node: FakeNode, request: web.Request) -> web.StreamResponse:
        error = {"message": "the engine ended unexpectedly", "type": "api_error", "code": "service_unavailable"}
        return web.json_response({"error": error}, status=503, headers={"Retry-After": "2"})

    async with AsyncExitStack() as stack:
        nodes = [FakeNode(f"n{number}", speak=crash).holds("Org/M") for number in range(4)]
        for node in nodes:
            await stack.enter_async_context(node.serving())
        cortex = await stack.enter_async_context(running_cortex(*nodes))
        status, body = await cortex.ask()
        assert (status, body["error"]["message"]) == (503, "the engine ended unexpectedly")
        assert sum(len(node.bodies) for node in nodes) == 2
