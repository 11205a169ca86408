"""Engines and nodes killed during requests: clients get a well-formed error, and the remaining processes serve."""

import asyncio
import json
import signal
import time
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from clients.stack import MODEL, TIMEOUT_SECONDS, Stack, get, post

LONG = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from one to a thousand."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}
SHORT = LONG | {"max_tokens": 1}


async def responses_while_killed(stack: Stack, victim: psutil.Process) -> tuple[list[Any], int, Any]:
    """Kill `victim` during three requests: a stream, a request without streaming, and a stream of OpenAI's client.

    Return the events of the stream, and the status and body of the second request. Asserts that OpenAI's client
    raises an error.
    """
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(stack.url, timeout=timeout) as session:

        async def ask() -> tuple[int, Any]:
            async with session.post("/v1/chat/completions", json=LONG) as response:
                return response.status, await response.json()

        complete = asyncio.create_task(ask())
        openai_error = asyncio.create_task(read_with_openai(stack))
        async with session.post("/v1/chat/completions", json=LONG | {"stream": True}) as response:
            assert response.status == 200
            begin = b"".join([await response.content.readuntil(b"\n\n") for _ in range(3)])
            await asyncio.to_thread(stack.node.until, lambda: stack.load()["in_flight"] == 3, "three requests run")
            victim.kill()
            body = begin + await response.read()
        *events, nothing = body.decode().split("\n\n")
        assert nothing == ""
        events = [event for event in events if not event.startswith(":")]  # keep-alive comments
        assert all(event.startswith("data: ") for event in events)
        assert (await openai_error).type == "api_error"
        return [event.removeprefix("data: ") for event in events], *(await complete)


async def read_with_openai(stack: Stack) -> openai.APIError:
    """Return the error that OpenAI's client raises for a stream that ends with an error."""
    async with stack.async_client() as client:
        fields: Any = {name: LONG[name] for name in ("model", "messages", "max_tokens")}
        stream = await client.chat.completions.create(**fields, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                pass
    return broken.value


def responses_until(stack: Stack, status: int) -> list[tuple[int, dict[str, str], Any]]:
    """Repeat a request until its status is `status`. Return all responses, including the last."""
    responses = []
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        responses.append(post(f"{stack.url}/v1/chat/completions", SHORT))
        if responses[-1][0] == status:
            return responses
        time.sleep(0.05)
    raise AssertionError(f"no response with status {status}; the last was {responses[-1]}")


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # its new parent may not collect the exit status
    except psutil.NoSuchProcess:
        return True


def is_retryable(response: tuple[int, dict[str, str], Any]) -> bool:
    status, headers, body = response
    return status == 503 and int(headers["retry-after"]) > 0 and body["error"]["code"] == "service_unavailable"


async def test_death_of_the_engine_ends_streams_with_an_error_and_the_engine_restarts(stack: Stack):
    victim = stack.engine()
    events, status, body = await responses_while_killed(stack, victim)
    *tokens, error, done = events
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in tokens)
    assert json.loads(error)["error"]["type"] == "api_error"
    assert done == "[DONE]"
    assert (status, body["error"]["code"]) == (503, "service_unavailable")

    *refused, (_, _, completion) = responses_until(stack, 200)
    assert refused
    assert all(is_retryable(response) for response in refused), refused
    assert completion["usage"]["completion_tokens"] == 1
    assert stack.engine().pid != victim.pid
    stack.until_idle()


async def test_death_of_the_node_ends_its_engine_and_ends_streams_with_an_error(stack: Stack):
    engine = stack.engine()
    events, status, body = await responses_while_killed(stack, psutil.Process(stack.node.process.pid))
    assert stack.node.process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL  # and is not a zombie
    *_, error, done = events
    assert json.loads(error)["error"]["code"] == "upstream_connection_error"
    assert done == "[DONE]"
    assert (status, body["error"]["code"]) == (502, "upstream_connection_error")
    stack.cortex.until(lambda: has_ended(engine), "the engine ends with its server")

    # Every request fails until the gateway has noticed the failure by itself.
    *refused, last = responses_until(stack, 503)
    assert {(code, body["error"]["code"]) for code, _, body in refused} <= {(502, "upstream_connection_error")}
    assert is_retryable(last)
    stack.cortex.until(lambda: get(f"{stack.url}/health")["status"] == "degraded", "the gateway misses its node")
    assert MODEL in [model["id"] for model in get(f"{stack.url}/v1/models")["data"]]

    stack.start_node()
    stack.await_model()
    assert post(f"{stack.url}/v1/chat/completions", SHORT)[0] == 200
