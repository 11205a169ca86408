"""Output limits that exceed the model of a third-party backend are lowered in requests that the gateway translates."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from cortex.fake_node import CHOICE, USAGE, FakeNode
from cortex.running_gateway import Cortex, running_cortex

MESSAGES = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def gateway(speak: Any) -> AsyncIterator[tuple[Cortex, FakeNode]]:
    async with FakeNode(speak=speak).holds("Org/M").serving() as backend:
        settings = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            yield cortex, backend


async def post(cortex: Cortex, path: str, **fields: Any) -> tuple[int, Any]:
    async with cortex.client.post(cortex.url + path, json={"model": "Org/M", **fields}) as response:
        return response.status, await response.json()


VLLM = (
    "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length is 32768 tokens "
    "and your request has 17459 input tokens (32000 > 32768 - 17459). (parameter=max_tokens, value=32000)"
)
OPENAI = (
    "max_tokens is too large: 32000. This model supports at most 15309 completion tokens, whereas you provided 32000."
)


@pytest.mark.parametrize(
    "text",
    [
        VLLM,
        OPENAI,
        "This model's maximum context length is 32768 tokens. However, you requested 49459 tokens (17459 in the "
        "messages, 32000 in the completion). Please reduce the length of the messages or completion.",
        "Invalid max_tokens value, the valid range of max_tokens is [1, 15309]",
        "`max_tokens` must be less than or equal to `15309`, the maximum value for `max_tokens` is less than the "
        "`context_window` for this model",
        "max_tokens: 32000 > 15309, which is the maximum allowed number of output tokens for claude-x",
        "The parameter `max_completion_tokens` specified in the request are not valid: integer above maximum value, "
        "expected a value <= 15309, but got 32000 instead.",
    ],
    ids=["vLLM", "OpenAI", "vLLM before 0.9", "DeepSeek", "Groq", "Anthropic", "o-series and Doubao"],
)
async def test_output_limit_above_that_of_the_backend_model_is_lowered(text: str) -> None:
    """Claude Code sends 32,000 for each model that it does not know, and the Messages API requires a limit."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        if (await request.json())["max_tokens"] > 15309:
            error = {"message": text, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)
        return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})

    async with gateway(speak) as (cortex, backend):
        status, message = await post(cortex, "/v1/messages", max_tokens=32000, messages=MESSAGES)
        assert (status, message["content"][0]["text"]) == (200, "Hello")
        assert [orjson.loads(body)["max_tokens"] for body in backend.bodies] == [32000, 15309]
        chat = {"max_tokens": 32000, "messages": [{"role": "user", "content": "Hi"}]}
        status, _ = await post(cortex, "/v1/chat/completions", **chat)  # a limit that the client need not state
        assert (status, len(backend.bodies)) == (400, 3)


def vllm(context: int, prompt: int) -> Any:
    """Answer like vLLM, which counts a prompt only as far as prompt and output limit exceed the context."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        limit = (await request.json()).get("max_tokens", 0)
        if prompt + max(limit, 1) <= context:
            return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})
        counted = context - limit + 1
        text = (
            f"This model's maximum context length is {context} tokens. However, you requested {limit} output tokens "
            f"and your prompt contains at least {counted} input tokens, for a total of at least {counted + limit} "
            "tokens. Please reduce the length of the input prompt or the number of requested output tokens."
        )
        return web.json_response({"error": {"message": text, "type": "BadRequestError", "code": 400}}, status=400)

    return speak


def limits_sent(backend: FakeNode) -> list[int | None]:
    limits = [orjson.loads(body).get("max_tokens") for body in backend.bodies]
    backend.bodies.clear()
    return limits


async def test_request_to_vllm_is_repeated_without_an_output_limit_that_exceeds_the_context() -> None:
    """Without a limit, vLLM generates as many tokens as the prompt leaves."""
    async with gateway(vllm(32768, 25_000)) as (cortex, backend):
        assert (await post(cortex, "/v1/messages", max_tokens=32000, messages=MESSAGES))[0] == 200
        assert limits_sent(backend) == [32000, None]
        for limit, sent in ((32768, [None]), (64000, [None]), (4000, [4000]), (32000, [32000, None])):
            assert (await post(cortex, "/v1/messages", max_tokens=limit, messages=MESSAGES))[0] == 200
            assert limits_sent(backend) == sent


async def test_prompt_that_is_too_long_for_vllm_is_sent_twice_and_then_rejected() -> None:
    async with gateway(vllm(32768, 40_000)) as (cortex, backend):
        status, message = await post(cortex, "/v1/messages", max_tokens=32000, messages=MESSAGES)
    assert limits_sent(backend) == [32000, None]
    assert (status, message["error"]["message"]) == (400, "prompt is too long: 32769 tokens > 32768 maximum")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_output_limit_learned_from_a_backend_error_is_remembered(path: str) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/chat/completions":
            return web.json_response({"detail": "Not Found"}, status=404)
        if (await request.json())["max_tokens"] > 15309:
            return web.json_response({"error": {"message": OPENAI, "type": "invalid_request_error"}}, status=400)
        return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})

    fields: dict[str, Any] = {"max_tokens": 32000, "messages": MESSAGES}
    if path == "/v1/responses":
        fields = {"max_output_tokens": 32000, "input": "Hi", "store": False}
    async with gateway(speak) as (cortex, backend):
        assert (await post(cortex, path, **fields))[0] == 200
        backend.bodies.clear()
        assert (await post(cortex, path, **fields))[0] == 200
        assert limits_sent(backend) == [15309]


async def test_prompt_that_the_backend_reports_as_above_the_context_is_not_sent_again() -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        text = VLLM.replace("17459", "40000")
        return web.json_response({"error": {"message": text, "type": "BadRequestError", "code": 400}}, status=400)

    async with gateway(speak) as (cortex, backend):
        status, message = await post(cortex, "/v1/messages", max_tokens=32000, messages=MESSAGES)
    assert (status, message["error"]["message"]) == (400, "prompt is too long: 40000 tokens > 32768 maximum")
    assert len(backend.bodies) == 1
