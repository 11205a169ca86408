"""Forwarding of requests and responses between client and node."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from cortex import fake_node
from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.http import request_cycle_and_disconnects
from ports import free_port

BODY = (
    b'{ "model" :  "Org/M", "stream": true, "stream_options":{ "include_usage": true},'
    b' "messages":[{"role":"user","content":"a \\"model\\" \xc3\xa9"}] }'
)


async def post(cortex: Cortex, body: bytes, **headers: str) -> tuple[int, bytes, Mapping[str, str]]:
    headers = {"content-type": "application/json", **headers}
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", data=body, headers=headers) as response:
        return response.status, await response.read(), response.headers


async def test_streaming_request_and_response_are_forwarded_unchanged(cortex: Cortex, node: FakeNode) -> None:
    status, body, headers = await post(cortex, BODY)
    assert (status, body) == (200, b"".join(fake_node.STREAM))
    assert node.bodies == [BODY]
    assert headers["x-node-says"] == "hi"
    assert headers["content-type"] == "text/event-stream"
    assert headers["x-accel-buffering"] == "no"


async def test_json_response_of_the_node_is_forwarded_unchanged(cortex: Cortex, node: FakeNode) -> None:
    status, body, headers = await post(cortex, b'{"model":"Org/M","messages":[]}')
    assert (status, body) == (200, fake_node.COMPLETION)
    assert headers["content-length"] == str(len(fake_node.COMPLETION))
    assert "x-accel-buffering" not in headers


async def test_model_alias_written_with_json_escapes_is_replaced(cortex: Cortex, node: FakeNode) -> None:
    await post(cortex, b'{"metadata":{"model":"small"},"model":"sm\\u0061ll"}')
    assert json.loads(node.bodies[0]) == {"metadata": {"model": "small"}, "model": "Org/M"}


async def test_invalid_model_url_reported_by_a_node_is_not_used(node: FakeNode) -> None:
    node.endpoint = "http://a..b:1"
    async with running_cortex(node) as cortex:
        status, _ = await cortex.ask()
    assert status == 200


async def test_request_body_that_stalls_is_408(cortex: Cortex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cycle_and_disconnects, "BODY_SECS", 0.05)
    host, port = cortex.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n"
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + headers + b"\r\n{")
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readuntil(b"}}")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    writer.close()
    await writer.wait_closed()


async def test_error_within_a_stream_increments_the_error_metric(cortex: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.fail_within_a_stream
    status, body = await cortex.ask(stream=True)
    assert (status, body.count(b"the engine died")) == (200, 1)

    async def counted() -> bool:
        return await cortex.sample("cortex_request_errors_total", model="Org/M", node="n1") == 1

    await eventually(counted)


async def test_stream_events_are_forwarded_before_the_node_sends_the_next(cortex: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.never_end
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", data=BODY) as response:
        expected = fake_node.ROLE + fake_node.chunk("a")
        assert await response.content.readexactly(len(expected)) == expected  # the node has not ended
        node.go_on.set()
        assert await response.read() == b""


async def test_request_with_a_model_alias_is_changed_only_in_the_model_name(cortex: Cortex, node: FakeNode) -> None:
    await post(cortex, BODY.replace(b"Org/M", b"small"))
    assert node.bodies == [BODY]


async def test_model_alias_is_replaced_only_in_the_model_field(cortex: Cortex, node: FakeNode) -> None:
    request = {"metadata": {"model": "small"}, "model": "small", "stream": False}
    await post(cortex, json.dumps(request).encode())
    assert json.loads(node.bodies[0]) == request | {"model": "Org/M"}


async def test_identity_and_connection_headers_of_clients_are_not_forwarded(cortex: Cortex, node: FakeNode) -> None:
    sent = {
        "Authorization": "Bearer secret",
        "X-Api-Key": "secret",
        "X-Helexa-Account-Id": "forged",
        "x-HELEXA-key-id": "forged",
        "X-Helexa-Usage-Id": "forged",
        "X-Helexa-Include-Usage": "forged",
        "X-Helexa-Keep-Alive": "forged",
        "X-Include-Thinking": "1",
        "X-Hop": "1",
        "Connection": "keep-alive, X-Hop",
    }
    await post(cortex, BODY, **sent)
    forwarded = node.headers[0]
    assert "secret" not in str(forwarded) and "forged" not in str(forwarded)
    assert not {"x-helexa-account-id", "x-hop"} & set(forwarded)
    assert forwarded["x-include-thinking"] == "1"
    assert forwarded["host"] == node.url.removeprefix("http://")


async def test_error_response_of_the_node_is_forwarded_with_retry_after(cortex: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.refuse
    status, body, headers = await post(cortex, BODY)
    assert (status, headers["retry-after"]) == (503, "7")
    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
    assert await cortex.sample("cortex_request_errors_total", model="Org/M", node="n1") == 1


@pytest.mark.parametrize(("code", "logged"), [("bad_word", "bad_word"), ("my secret prompt", "None")])
async def test_error_text_of_a_node_is_forwarded_but_not_logged(
    cortex: Cortex, node: FakeNode, caplog: pytest.LogCaptureFixture, code: str, logged: str
) -> None:
    error = {"message": "the prompt 'my secret prompt' has a bad word", "type": "invalid_request_error", "code": code}

    async def refuse(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": error}, status=400)

    node.speak = refuse
    with caplog.at_level(logging.DEBUG):
        status, body, _ = await post(cortex, BODY)
    assert (status, json.loads(body)) == (400, {"error": error})
    assert f"node rejected the request node=n1 status=400 code={logged}" in caplog.text
    assert "my secret prompt" not in caplog.text


async def test_stream_of_a_node_that_dies_ends_well_formed_with_an_error(cortex: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.die_within_an_event
    status, body, _ = await post(cortex, BODY)
    assert status == 200
    *events, error, done, trailer = body.split(b"\n\n")
    assert b"\n\n".join([*events, b""]) == fake_node.ROLE + fake_node.chunk("a")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_connection_error"
    assert (done, trailer) == (b"data: [DONE]", b"")
    assert await cortex.sample("cortex_request_errors_total", model="Org/M", node="n1") == 1
    node.speak = None
    assert (await cortex.ask())[0] == 200


async def test_node_that_dies_within_a_json_response_is_502(cortex: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.die_within_json
    status, body, _ = await post(cortex, BODY)
    assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_connection_error")
    node.speak = fake_node.die_late_within_json
    with pytest.raises(aiohttp.ClientPayloadError):  # the response head was already sent
        await post(cortex, BODY)
    node.speak = None
    assert (await cortex.ask())[0] == 200


async def test_node_that_dies_before_the_first_byte_is_502(cortex: Cortex, node: FakeNode) -> None:
    node.speak = fake_node.die_before_the_first_byte
    status, body, _ = await post(cortex, BODY)
    assert status == 502
    assert json.loads(body)["error"] == {
        "message": "node 'n1' did not respond; try again",
        "type": "api_error",
        "code": "upstream_connection_error",
        "param": None,
    }


async def test_node_failure_before_the_first_byte_is_retried_on_another_node() -> None:
    async with (
        FakeNode("bad", speak=fake_node.die_before_the_first_byte).holds("Org/M").serving() as bad,
        FakeNode("good", health={"models": [{"id": "Org/M", "in_flight": 9}]}).holds("Org/M").serving() as good,
        running_cortex(bad, good) as cortex,
    ):
        assert (await cortex.ask())[0] == 200
        assert (len(bad.bodies), len(good.bodies)) == (1, 1)


async def test_request_to_an_unreachable_node_is_502(cortex: Cortex, node: FakeNode) -> None:
    node.endpoint = f"http://127.0.0.1:{free_port()}"
    node.models = [node.models[0] | {"id": "Org/Elsewhere"}]
    await eventually(lambda: _lists(cortex, "Org/Elsewhere"))
    status, body = await cortex.ask("Org/Elsewhere")
    assert (status, body["error"]["code"]) == (502, "upstream_connection_error")


@pytest.mark.parametrize("speak", [fake_node.never_end, fake_node.never_begin])
async def test_client_disconnect_cancels_the_request_on_the_node(
    cortex: Cortex, node: FakeNode, speak: fake_node.Speak
) -> None:
    node.speak = speak
    post_task = asyncio.create_task(post(cortex, BODY))
    await node.spoke.wait()
    assert node.speaking == 1
    post_task.cancel()
    await eventually(lambda: node.speaking == 0)

    async def counted() -> bool:
        return await cortex.sample("cortex_requests_total", model="Org/M", node="n1") == 1

    await eventually(counted)
    assert await cortex.sample("cortex_request_duration_seconds_count", model="Org/M", node="n1") == 1
    assert await cortex.sample("cortex_request_errors_total", model="Org/M", node="n1") == 0


@pytest.mark.parametrize(("speak", "tokens"), [(fake_node.never_end, 1), (fake_node.never_begin, 0)])
async def test_client_disconnect_is_logged_with_its_tokens(
    cortex: Cortex, node: FakeNode, caplog: pytest.LogCaptureFixture, speak: fake_node.Speak, tokens: int
) -> None:
    node.speak = speak
    with caplog.at_level(logging.INFO, "helexa.cortex.requests"):
        headers = {"content-type": "application/json"}
        post_request = cortex.client.post(f"{cortex.url}/v1/chat/completions", data=BODY, headers=headers)
        if tokens:
            async with post_request as response:
                await response.content.readuntil(b'"a"')
        else:
            task = asyncio.ensure_future(post_request)
            await node.spoke.wait()
            task.cancel()
        await eventually(lambda: caplog.records)
    (line,) = caplog.messages
    for field in ("status=499", f"prompt_tokens={len(BODY) // 4}", f"completion_tokens={tokens}", "client_gone=True"):
        assert field in line
    (row,) = await cortex.gateway.ledger.recent(1)
    assert (row["status"], row["completion"]) == (499, tokens)


async def test_openai_client_reads_streams_responses_and_errors(cortex: Cortex, node: FakeNode) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cortex.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Hi"}]
        completion = await client.chat.completions.create(model="small", messages=messages)
        assert completion.choices[0].message.content == "Hello"
        usage: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="small", messages=messages, stream=True, stream_options=usage
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello é"
        assert chunks[-1].usage.prompt_tokens == 7
        with pytest.raises(openai.NotFoundError, match="model 'nobody' not found"):
            await client.chat.completions.create(model="nobody", messages=messages)
        node.speak = fake_node.die_within_an_event
        stream = await client.chat.completions.create(model="small", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match=r"the response of node '.+' ended before it was complete"):
            _ = [chunk async for chunk in stream]
        assert "Org/M" in [model.id async for model in client.models.list()]


async def _lists(cortex: Cortex, model: str) -> bool:
    return model in [entry["id"] for entry in (await cortex.get("/v1/models"))["data"]]


@pytest.mark.parametrize("speak", [fake_node.never_begin, fake_node.never_go_on])
async def test_timed_out_request_is_not_sent_to_another_node(speak: fake_node.Speak) -> None:
    async with FakeNode("n1").holds("Org/M").serving() as first, FakeNode("n2").holds("Org/M").serving() as second:
        first.speak = second.speak = speak
        async with running_cortex(first, second, settings={"gateway": {"answer_timeout_secs": 0.5}}) as cortex:
            status, body = await cortex.ask()
    assert (status, body["error"]["code"]) == (504, "upstream_timeout")
    assert len(first.bodies + second.bodies) == 1
