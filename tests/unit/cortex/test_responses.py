"""The Responses API through the gateway: charges, broken streams, and stored responses."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from cortex import fake_node
from cortex.budgets.test_response_meter import COMPLETED, CREATED, TEXT, USAGE, event, response
from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex

HEADERS = {"authorization": "Bearer capped"}
KEYS = [{"key": name, "account_id": "acme", "key_id": name, "hard_cap": 3000} for name in ("capped", "other")]
SETTINGS = {"entitlements": {"require_auth": True, "keys": KEYS}}
REQUEST: dict[str, Any] = {"model": "Org/M", "input": "Hi", "max_output_tokens": 50}
BROKEN = {
    "type": "error",
    "code": "upstream_connection_error",
    "message": "the response of node 'n1' ended before it was complete; try again",
    "param": None,
}


@pytest.fixture
async def keyed(node: FakeNode) -> AsyncIterator[Cortex]:
    """A gateway with two keys, each of 3,000 tokens."""
    async with running_cortex(node, settings=SETTINGS) as cortex:
        yield cortex


async def post(cortex: Cortex, path: str = "/v1/responses", **fields: Any) -> tuple[int, bytes]:
    async with cortex.client.post(cortex.url + path, json=REQUEST | fields, headers=HEADERS) as response:
        return response.status, await response.read()


async def spent(cortex: Cortex) -> int:
    """Return the tokens charged to the key after every reservation is settled."""
    await eventually(lambda: not cortex.gateway.ledger.open)
    key = cortex.gateway.authenticator.static[0]
    return (await cortex.gateway.ledger.budget(key.principal)).spent


async def end_in_two_chunks(node: FakeNode, request: web.Request) -> web.StreamResponse:
    response = await fake_node.begin(request, CREATED + TEXT, COMPLETED[:100])
    await node.go_on.wait()
    await response.write(COMPLETED[100:])
    return response


async def break_off(node: FakeNode, request: web.Request) -> web.StreamResponse:
    response = await fake_node.begin(request, CREATED, TEXT + COMPLETED[:200])
    assert request.transport is not None
    request.transport.close()
    return response


async def test_responses_stream_is_charged_by_the_usage_in_its_last_event(keyed: Cortex, node: FakeNode) -> None:
    node.speak = end_in_two_chunks
    post_task = asyncio.create_task(post(keyed, stream=True))
    await eventually(lambda: node.speaking)
    node.go_on.set()
    assert await post_task == (200, CREATED + TEXT + COMPLETED)
    assert await spent(keyed) == 8


async def test_client_that_disconnects_is_charged_for_prompt_and_output(keyed: Cortex, node: FakeNode) -> None:
    node.speak = end_in_two_chunks
    async with keyed.client.post(
        f"{keyed.url}/v1/responses", json=REQUEST | {"stream": True}, headers=HEADERS
    ) as http_response:
        await http_response.content.readuntil(b"event: response.completed")
    assert await spent(keyed) == len(json.dumps(REQUEST | {"stream": True})) // 4 + 1


async def test_non_streaming_response_is_charged_by_its_usage(keyed: Cortex, node: FakeNode) -> None:
    async def respond(node: FakeNode, request: web.Request) -> web.StreamResponse:
        # third-party backends may put fields of the request after the usage
        return web.json_response({"usage": USAGE, **{k: v for k, v in response().items() if k != "usage"}})

    node.speak = respond
    assert (await post(keyed))[0] == 200
    assert await spent(keyed) == 8


async def test_broken_stream_ends_with_a_responses_error_event(keyed: Cortex, node: FakeNode) -> None:
    node.speak = break_off
    status, body = await post(keyed, stream=True)
    assert status == 200
    events, _, error_event = body.partition(b"event: error\n")
    assert events.startswith(CREATED + TEXT)
    data, end = error_event.removeprefix(b"data: ").split(b"\n", 1)
    assert (json.loads(data), end) == (BROKEN | {"sequence_number": 2}, b"\n")
    assert await spent(keyed) == len(json.dumps(REQUEST | {"stream": True})) // 4 + 1


async def test_failed_responses_stream_increments_the_error_metric(keyed: Cortex, node: FakeNode) -> None:
    async def fail(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return await fake_node.begin(request, CREATED, event("response.failed", response=response()))

    node.speak = fail
    assert (await post(keyed, stream=True))[0] == 200

    async def counted() -> bool:
        return await keyed.sample("cortex_request_errors_total", model="Org/M", node="n1") == 1

    await eventually(counted)


async def test_budget_reserves_tokens_for_every_choice_and_for_the_previous_response(
    keyed: Cortex, node: FakeNode
) -> None:
    node.models[0]["limit"] = {"context": 4000, "input": 3000, "output": 1000}
    await eventually(lambda: any(m.limit for n in keyed.gateway.fleet.view().nodes for m in n.models.values()))
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1000}
    assert (await post(keyed, "/v1/chat/completions", **chat, n=3))[0] == 429
    assert (await post(keyed, "/v1/chat/completions", **chat, n=2))[0] == 200
    assert (await post(keyed, previous_response_id="resp_1"))[0] == 429
    assert (await post(keyed))[0] == 200


async def test_texts_of_an_embedding_request_may_exceed_the_context_in_total(keyed: Cortex, node: FakeNode) -> None:
    node.models[0]["limit"] = {"context": 50}
    await eventually(lambda: any(m.limit for n in keyed.gateway.fleet.view().nodes for m in n.models.values()))
    assert (await post(keyed, "/v1/embeddings", input=["some words"] * 100))[0] == 200
    status, body = await post(keyed, "/v1/embeddings", input=["some words", "x" * 6500])
    assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")


# Responses stored on nodes


@pytest.fixture
async def nodes() -> AsyncIterator[list[FakeNode]]:
    """Three nodes that serve the model and store responses."""
    async with AsyncExitStack() as stack:
        names = ("n1", "n2", "n3")
        nodes = [
            FakeNode(name=name, health={"responses": f"resp_{name}"}).holds("Org/M", limit={"context": 500})
            for name in names
        ]
        yield [await stack.enter_async_context(node.serving()) for node in nodes]


async def request_stored(cortex: Cortex, method: str, id: str, key: str = "capped") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with cortex.client.request(method, f"{cortex.url}/v1/responses/{id}", headers=headers) as response:
        return response.status, await response.json()


async def test_conversation_continues_on_the_node_that_stores_its_previous_response(nodes: list[FakeNode]) -> None:
    async with running_cortex(*nodes, settings=SETTINGS) as cortex:
        for _ in range(5):
            for node in nodes:
                assert (await post(cortex, previous_response_id=f"resp_{node.name}abc"))[0] == 200
        assert [len(node.bodies) for node in nodes] == [5, 5, 5]
        nodes[1].speak = fake_node.refuse
        assert (await post(cortex, previous_response_id="resp_n2abc"))[0] == 503  # not retried on another node
        assert [len(node.bodies) for node in nodes] == [5, 6, 5]
        assert (await post(cortex, previous_response_id="resp_unknown"))[0] == 200
        cortex.gateway.fleet.cordon("n1", True)
        body_count = len(nodes[0].bodies)
        assert (await post(cortex, previous_response_id="resp_n1abc"))[0] == 200  # sent to another node
        assert len(nodes[0].bodies) == body_count


REFERENCES = ({"type": "item_reference", "id": "msg_n2abc_0"}, {"id": "msg_n2abc_0"})


@pytest.mark.parametrize("reference", REFERENCES, ids=["typed", "untyped"])
async def test_referenced_response_item_is_requested_from_the_node_that_stores_it(
    nodes: list[FakeNode], reference: dict[str, Any]
) -> None:
    """Vercel's AI SDK refers to the items of earlier responses, without `previous_response_id`."""
    items = [{"role": "user", "content": "Hi"}, reference, {"role": "user", "content": "Go on"}]
    async with running_cortex(*nodes, settings=SETTINGS) as cortex:
        for _ in range(6):
            assert (await post(cortex, input=items))[0] == 200
        assert [len(node.bodies) for node in nodes] == [0, 6, 0]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_stored_response_is_requested_from_the_node_that_has_it(nodes: list[FakeNode], method: str) -> None:
    async with running_cortex(*nodes, settings=SETTINGS) as cortex:
        stored = {"id": "resp_n2abc", "object": "response", "by": method}
        assert await request_stored(cortex, method, "resp_n2abc") == (200, stored)
        assert [len(node.headers) for node in nodes] == [0, 1, 0]
        assert nodes[1].headers[0]["x-helexa-account-id"] == "acme"
        assert "authorization" not in nodes[1].headers[0]
        for id, key in (("resp_n2abc", "other"), ("resp_unknown", "capped"), ("resp_n2a%2F..%2Fb", "capped")):
            status, body = await request_stored(cortex, method, id, key)
            assert (status, body["error"]["code"] in ("response_not_found", "unknown_path")) == (404, True)
        assert (await request_stored(cortex, method, "resp_n2abc?include=all"))[1]["error"][
            "code"
        ] == "unsupported_parameter"
        assert (await request_stored(cortex, method, "resp_n2abc", "nobody"))[0] == 401
        nodes[1].down = True
        assert (await request_stored(cortex, method, "resp_n2abc"))[0] == 502


async def test_input_items_of_a_response_are_requested_from_the_node_that_stores_it(nodes: list[FakeNode]) -> None:
    async with running_cortex(*nodes, settings=SETTINGS) as cortex:
        status, body = await request_stored(cortex, "GET", "resp_n2abc/input_items?limit=2&after=msg_1")
        assert (status, body["by"]) == (200, "limit=2&after=msg_1")
        assert [len(node.headers) for node in nodes] == [0, 1, 0]
        assert (await request_stored(cortex, "GET", "resp_n2abc/input_items?limit=0"))[0] == 400
        assert (await request_stored(cortex, "GET", "resp_n2abc/input_items", "other"))[0] == 404
        assert (await request_stored(cortex, "GET", "resp_n2abc/input_items", "nobody"))[0] == 401


async def test_compact_request_is_reserved_and_charged_like_a_response(node: FakeNode, keyed: Cortex) -> None:
    async def compact(node: FakeNode, request: web.Request) -> web.StreamResponse:
        usage = {"input_tokens": 30, "output_tokens": 12, "total_tokens": 42}
        return web.json_response({"id": "r", "object": "response.compaction", "output": [], "usage": usage})

    node.speak = compact
    assert (await post(keyed, "/v1/responses/compact"))[0] == 200
    assert await spent(keyed) == 42
    status, body = await post(keyed, "/v1/responses/compact", max_output_tokens=4000)
    assert (status, b"tokens_left" in body) == (429, True)
    assert len(node.bodies) == 1
