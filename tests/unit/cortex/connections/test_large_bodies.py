"""Large request bodies are bounded and parsed in worker processes."""

import asyncio
import functools
import io
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.core.errors import ApiError
from helexa.cortex import routing
from helexa.cortex.anthropic.messages_to_chat import MAX_BLOCKS, MAX_MESSAGES, MAX_TOOLS
from helexa.cortex.anthropic.reply import Translation
from helexa.cortex.anthropic.request_settings_and_token_count import CountRequest
from helexa.cortex.forwarding import request_body_limit_and_workers
from helexa.cortex.forwarding.request import ClientRequest, parse_request
from helexa.cortex.forwarding.request_body_limit_and_workers import (
    MAX_CONTAINERS,
    BodyWorkers,
    check_containers,
    is_large,
)
from helexa.cortex.forwarding.token_bounds import check_prompt
from helexa.cortex.routes import body_translation, generation

HI = {"role": "user", "content": "x"}
MANY = [HI, {"role": "assistant", "content": "Hello"}] * 10_000  # consecutive messages of one role would be one turn
TEXT = {"type": "text", "text": "x"}


def message_body(**fields: Any) -> bytes:
    return json.dumps({"model": "small", "max_tokens": 1, "messages": [HI], **fields}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"messages": [HI] * (MAX_MESSAGES + 1)}, "messages: has 100001 messages; the limit is 100000, so send fewer"),
        ({"tools": [{"name": "f"}] * (MAX_TOOLS + 1)}, "tools: has 10001 tools; the limit is 10000, so send fewer"),
        (
            {"messages": [{"role": "user", "content": [TEXT] * (MAX_BLOCKS + 1)}]},
            "messages: has 200001 content blocks in all; the limit is 200000, so send fewer",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [TEXT] * MAX_BLOCKS}]}]},
            "messages: has 200001 content blocks in all; the limit is 200000, so send fewer",
        ),
        (
            {"system": [TEXT], "messages": [{"role": "user", "content": [TEXT] * MAX_BLOCKS}]},
            "messages: has 200001 content blocks in all; the limit is 200000, so send fewer",
        ),
    ],
)
@pytest.mark.parametrize("parse", [Translation.parse, CountRequest.parse])
def test_request_with_too_many_messages_tools_or_blocks_is_rejected(
    parse: Callable[[bytes], Any], fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ApiError) as rejected:
        parse(message_body(**fields))
    assert (rejected.value.status, rejected.value.code, str(rejected.value)) == (400, "invalid_anthropic_body", problem)


def test_json_objects_and_arrays_of_a_body_are_counted_outside_of_strings() -> None:
    check_containers(b'["%b"]' % (b'[{\\"' * MAX_CONTAINERS))
    check_containers(b'["\\\\",%b{}]' % (b"{}," * (MAX_CONTAINERS - 2)))
    check_containers(b"{" * 10 + b'"' + b"[" * MAX_CONTAINERS)  # not JSON: the parser rejects it
    for body in (b'["\\\\",%b]' % (b"[]," * MAX_CONTAINERS), b'{"[":%b' % (b'{"a{":' * MAX_CONTAINERS)):
        with pytest.raises(ApiError, match="has more than 500000 objects and arrays") as rejected:
            check_containers(body)
        assert rejected.value.status == 400


@pytest.mark.parametrize(
    ("body", "large"),
    [
        (b"[" + b"1," * 100_000 + b"1]", False),
        (b"[" + b"1," * 200_000 + b"1]", True),
        (b'"' + b"x" * (1 << 20) + b'"', False),
        (b'"' + b"x" * (5 << 20) + b'"', True),
    ],
)
def test_body_counts_as_large_by_its_number_of_values_or_bytes(body: bytes, large: bool) -> None:
    assert is_large(body) is large


@pytest.fixture
def small_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make functions that parse bodies fail on large bodies in this process, but not in worker processes."""

    def guarded(function: Callable[..., Any], body_of: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guard(*args: Any, **options: Any) -> Any:
            body = body_of(*args)
            assert not isinstance(body, bytes) or not is_large(body), "a large body is parsed in the gateway's process"
            return function(*args, **options)

        return guard

    monkeypatch.setattr(orjson, "loads", guarded(orjson.loads, lambda body: body))
    for module in (body_translation, generation):
        monkeypatch.setattr(module, "parse_request", guarded(parse_request, lambda path, headers, body: body))
    monkeypatch.setattr(ClientRequest, "body_for", guarded(ClientRequest.body_for, lambda request, *args: request.body))
    monkeypatch.setattr(routing, "_prefix", guarded(routing._prefix, lambda account, *args: b"x" * (5 << 20)))


@pytest.fixture
async def two_nodes() -> AsyncIterator[tuple[Cortex, list[FakeNode]]]:
    async with (
        FakeNode("n1").holds("Org/M").serving() as first,
        FakeNode("n2").holds("Org/M").serving() as second,
        running_cortex(first, second, aliases={"small": "Org/M"}) as cortex,
    ):
        yield cortex, [first, second]


async def tokenize(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.json_response({"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]})


async def post(cortex: Cortex, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    headers["content-type"] = "application/json"
    async with cortex.client.post(cortex.url + path, data=body, headers=headers) as response:
        return response.status, await response.json(content_type=None)


@pytest.mark.usefixtures("small_only")
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/messages", "messages"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/embeddings", "input"),
    ],
)
async def test_large_request_body_is_parsed_in_a_worker_process(
    two_nodes: tuple[Cortex, list[FakeNode]], path: str, field: str
) -> None:
    cortex, nodes = two_nodes
    values: dict[str, Any] = {field: MANY}
    if path == "/v1/embeddings":
        values = {field: ["x"] * 100_000}
    body = json.dumps({"model": "small", "max_tokens": 1, **values}).encode()
    assert is_large(body)
    status, response = await post(cortex, path, body)
    assert status == 200, response
    (sent,) = [body for node in nodes for body in node.bodies]
    forwarded = json.loads(sent)
    assert (forwarded["model"], len(forwarded[field])) == ("Org/M", len(values[field]))


@pytest.mark.usefixtures("small_only")
async def test_large_prompt_is_checked_in_a_worker_process(node: FakeNode) -> None:
    limit = {"context": 1000, "input": 900, "output": 100}
    node.models = [{"id": "Org/M", "status": "loaded", "limit": limit}]
    body = json.dumps({"model": "Org/M", "messages": MANY}).encode()
    async with running_cortex(node) as cortex:
        await eventually(lambda: cortex.gateway.fleet.view().nodes[0].models["Org/M"].limit is not None)
        status, response = await post(cortex, "/v1/chat/completions", body)
    assert (status, response["error"]["code"], response["error"]["max"]) == (400, "context_length_exceeded", 1000)


@pytest.mark.usefixtures("small_only")
async def test_large_count_tokens_request_is_translated_in_a_worker_process(cortex: Cortex, node: FakeNode) -> None:
    node.speak = tokenize
    status, response = await post(cortex, "/v1/messages/count_tokens", message_body(messages=MANY))
    assert (status, response) == (200, {"input_tokens": 3})
    assert json.loads(node.bodies[-1])["model"] == "Org/M"


async def test_large_body_that_is_not_json_is_rejected(cortex: Cortex) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        status, response = await post(cortex, path, b'{"model":"small","messages":[' + b"[]," * 300_000)
        assert (status, "not valid JSON" in response["error"]["message"]) == (400, True)


async def test_body_of_too_many_objects_is_not_forwarded(cortex: Cortex, node: FakeNode) -> None:
    for path, field in (
        ("/v1/chat/completions", b"messages"),
        ("/v1/responses", b"input"),
        ("/v1/completions", b"prompt"),
        ("/v1/embeddings", b"x"),
        ("/tokenize", b"messages"),
        ("/v1/responses/input_tokens", b"input"),
        ("/v1/messages", b"messages"),
        ("/v1/messages/count_tokens", b"messages"),
    ):
        body = b'{"model":"Org/M","max_tokens":1,"%b":[%b{}]}' % (field, b"{}," * MAX_CONTAINERS)
        async with cortex.client.post(cortex.url + path, data=io.BytesIO(body)) as response:
            message = (await response.json())["error"]["message"]
            assert (response.status, "500000 objects and arrays" in message) == (400, True), path
    assert not node.bodies


async def test_count_tokens_of_an_unknown_model_is_404(cortex: Cortex) -> None:
    status, response = await post(cortex, "/v1/messages/count_tokens", message_body(model="nobody/has-it"))
    assert (status, response["type"], response["error"]["type"]) == (404, "error", "not_found_error")


async def test_count_tokens_of_an_unknown_model_is_503_while_no_node_is_up(node: FakeNode) -> None:
    node.down = True
    async with running_cortex(node, ready=False) as cortex:
        status, response = await post(cortex, "/v1/messages/count_tokens", message_body(model="nobody/has-it"))
    assert (status, response["type"], response["error"]["type"]) == (503, "error", "overloaded_error")


async def test_large_count_tokens_request_is_rejected_if_the_budget_is_spent(node: FakeNode) -> None:
    settings = {"entitlements": {"keys": [{"key": "capped", "account_id": "acme", "hard_cap": 100}]}}
    async with running_cortex(node, settings=settings) as cortex:
        node.speak = tokenize
        path, body = "/v1/messages/count_tokens", message_body(model="Org/M")
        assert (await post(cortex, path, body, authorization="Bearer capped"))[0] == 200
        principal = cortex.gateway.authenticator.admit([(b"authorization", b"Bearer capped")])
        assert principal is not None
        await (await cortex.gateway.ledger.reserve(principal, "r", "Org/M", 100)).settle(100, 0)
        await cortex.gateway.ledger.flush()
        body_count = len(node.bodies)
        status, response = await post(cortex, path, body, authorization="Bearer capped")
        assert (status, response["error"]["type"]) == (429, "rate_limit_error")
        assert len(node.bodies) == body_count


@pytest.fixture
async def workers() -> AsyncIterator[BodyWorkers]:
    workers = BodyWorkers()
    yield workers
    await workers.close()


async def test_error_raised_in_a_worker_process_equals_the_error_raised_locally(workers: BodyWorkers) -> None:
    body = json.dumps({"messages": MANY}).encode()
    with pytest.raises(ApiError) as local:
        check_prompt(body, 10)
    with pytest.raises(ApiError) as remote:
        await workers.run(check_prompt, body, 10)
    assert remote.value.__dict__ == local.value.__dict__
    assert str(remote.value) == str(local.value)


async def test_request_whose_worker_process_dies_is_503_and_the_worker_is_replaced(workers: BodyWorkers) -> None:
    assert await workers.run(os.getpid) != os.getpid()
    with pytest.raises(ApiError) as lost:
        await workers.run(os._exit, 1)
    assert (lost.value.status, lost.value.code) == (503, "service_unavailable")
    assert await workers.run(os.getpid) != os.getpid()


async def test_request_is_503_if_its_worker_process_dies_while_another_starts(
    workers: BodyWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await workers.run(os.getpid) != os.getpid()

    def fail() -> None:
        raise OSError("handle is closed")

    monkeypatch.setattr(workers._pool, "_adjust_process_count", fail)
    with pytest.raises(ApiError) as lost:
        await workers.run(os.getpid)
    assert (lost.value.status, lost.value.code) == (503, "service_unavailable")
    assert await workers.run(os.getpid) != os.getpid()


async def test_close_of_the_worker_pool_does_not_wait_for_a_busy_worker_process() -> None:
    workers = BodyWorkers()
    job = asyncio.create_task(workers.run(time.sleep, 60))
    await eventually(lambda: workers._pool is not None)
    async with asyncio.timeout(60):
        await workers.close()
    with pytest.raises(ApiError):
        await job


async def test_large_request_body_gets_a_503_if_too_many_bodies_wait_for_a_worker_process(
    workers: BodyWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body_limit_and_workers, "MAX_WAITING", 1)
    for _ in range(request_body_limit_and_workers.PROCESSES):
        await workers._free.acquire()
    waiting = asyncio.create_task(workers.run(os.getpid))
    await eventually(lambda: workers._waiting == 1)
    with pytest.raises(ApiError) as refused:
        await workers.run(os.getpid)
    assert (refused.value.status, refused.value.code) == (503, "rate_limit_exceeded")
    workers._free.release()
    assert await waiting != os.getpid()


PARENT = """
import asyncio, os
from helexa.cortex.forwarding.request_body_limit_and_workers import BodyWorkers

async def main():
    print(await BodyWorkers().run(os.getpid), flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_worker_processes_exit_if_the_gateway_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    await parent.wait()

    def has_exited() -> bool:
        with suppress(ProcessLookupError, FileNotFoundError):
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            return state == "Z"
        return True

    await eventually(has_exited)
