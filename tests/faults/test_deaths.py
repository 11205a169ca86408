"""Processes that are killed while they answer: clients get a well-formed end, and whatever is left keeps serving."""

import asyncio
import json
import signal
import time
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from clients.stack import MODEL, PATIENCE_SECONDS, Stack, get, post

LONG = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from one to a thousand."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}
SHORT = LONG | {"max_tokens": 1}


async def answers_while_killed(stack: Stack, victim: psutil.Process) -> tuple[list[Any], int, Any]:
    """The events of a stream in whose midst `victim` is killed, and status and body of a whole answer beside it.

    A third answer is read by OpenAI's client, which must understand what happened.
    """
    timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    async with aiohttp.ClientSession(stack.url, timeout=timeout) as session:

        async def ask() -> tuple[int, Any]:
            async with session.post("/v1/chat/completions", json=LONG) as response:
                return response.status, await response.json()

        whole = asyncio.create_task(ask())
        read = asyncio.create_task(read_with_openai(stack))
        async with session.post("/v1/chat/completions", json=LONG | {"stream": True}) as response:
            assert response.status == 200
            begin = b"".join([await response.content.readuntil(b"\n\n") for _ in range(3)])
            await asyncio.to_thread(stack.node.until, lambda: stack.load()["in_flight"] == 3, "all three are answered")
            victim.kill()
            body = begin + await response.read()
        *events, nothing = body.decode().split("\n\n")
        assert nothing == ""
        events = [event for event in events if not event.startswith(":")]  # a comment keeps the connection alive
        assert all(event.startswith("data: ") for event in events)
        assert (await read).type == "api_error"
        return [event.removeprefix("data: ") for event in events], *(await whole)


async def read_with_openai(stack: Stack) -> openai.APIError:
    """What OpenAI's client makes of a stream that ends in an error."""
    async with stack.async_client() as client:
        fields: Any = {name: LONG[name] for name in ("model", "messages", "max_tokens")}
        stream = await client.chat.completions.create(**fields, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                pass
    return broken.value


def refusals_until(stack: Stack, status: int) -> list[tuple[int, dict[str, str], Any]]:
    """What requests are told until one is answered with `status`, that answer included."""
    replies = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        replies.append(post(f"{stack.url}/v1/chat/completions", SHORT))
        if replies[-1][0] == status:
            return replies
        time.sleep(0.05)
    raise AssertionError(f"never answered with {status}: {replies[-1]}")


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # whoever adopted it may not care
    except psutil.NoSuchProcess:
        return True


def is_retryable(reply: tuple[int, dict[str, str], Any]) -> bool:
    status, headers, body = reply
    return status == 503 and int(headers["retry-after"]) > 0 and body["error"]["code"] == "service_unavailable"


async def test_the_engine_dies_while_it_answers(stack: Stack):
    victim = stack.engine()
    events, status, body = await answers_while_killed(stack, victim)
    *tokens, error, done = events
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in tokens)
    assert json.loads(error)["error"]["type"] == "api_error"
    assert done == "[DONE]"
    assert (status, body["error"]["code"]) == (503, "service_unavailable")

    *refused, (_, _, answer) = refusals_until(stack, 200)
    assert refused
    assert all(is_retryable(reply) for reply in refused), refused
    assert answer["usage"]["completion_tokens"] == 1
    assert stack.engine().pid != victim.pid
    stack.until_idle()


async def test_the_node_dies_while_it_answers(stack: Stack):
    engine = stack.engine()
    events, status, body = await answers_while_killed(stack, psutil.Process(stack.node.process.pid))
    assert stack.node.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL  # nor is it left a zombie
    *_, error, done = events
    assert json.loads(error)["error"]["code"] == "upstream_connection_error"
    assert done == "[DONE]"
    assert (status, body["error"]["code"]) == (502, "upstream_connection_error")
    stack.cortex.until(lambda: has_ended(engine), "the engine ends with its server")

    # The gateway finds out by itself, and meanwhile it says so for every request.
    *refused, last = refusals_until(stack, 503)
    assert {(code, reply["error"]["code"]) for code, _, reply in refused} <= {(502, "upstream_connection_error")}
    assert is_retryable(last)
    stack.cortex.until(lambda: get(f"{stack.url}/health")["status"] == "degraded", "the gateway misses its node")
    assert MODEL in [model["id"] for model in get(f"{stack.url}/v1/models")["data"]]

    stack.start_node()
    stack.await_model()
    assert post(f"{stack.url}/v1/chat/completions", SHORT)[0] == 200
