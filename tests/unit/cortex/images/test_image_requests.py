"""Requests with images from the clients of OpenAI and Anthropic, through a real gateway to a fake node."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from anthropic.types import ModelInfo
from pydantic import TypeAdapter

from cortex.anthropic.conversation_node import talking
from cortex.fake_node import COMPLETION, FakeNode
from cortex.images.image_server import PNG, PNG_URL, ImageServer, image_server
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.core.image_file import TYPICAL_TOKENS
from helexa.cortex.forwarding.token_bounds import IMAGE_TOKENS

BASE64 = base64.b64encode(PNG).decode()
SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}
LARGE = "data:image/jpeg;base64," + base64.b64encode(bytes(1_200_000)).decode()
UNKNOWN_SIZE = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/"}}
KEY = "a-key"
CAP = 10_000


@pytest.fixture
async def server() -> AsyncIterator[ImageServer]:
    async with image_server() as server:
        yield server


@pytest.fixture
async def node() -> AsyncIterator[FakeNode]:
    async with FakeNode().holds("Org/M", capabilities=["text", "vision"], limit={"context": 32_768}).serving() as node:
        yield node


def fetching(server: ImageServer) -> dict[str, Any]:
    return {"images": {"allowed_hosts": server.hosts, "private_networks": ["127.0.0.0/8"]}}


@asynccontextmanager
async def openai_client(cortex: Cortex) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cortex.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def image(url: str = PNG_URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*content: Any) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


TEXT = {"type": "text", "text": "What is this?"}


def sent(node: FakeNode) -> Any:
    return json.loads(node.bodies[-1])


async def test_data_url_in_a_chat_request_reaches_the_node_unchanged(cortex: Cortex, node: FakeNode) -> None:
    async with openai_client(cortex) as client:
        messages = user(TEXT, image(detail="low"))
        answer = await client.chat.completions.create(model="Org/M", messages=messages)
        assert (answer.choices[0].message.content, answer.usage and answer.usage.prompt_tokens) == ("Hello", 7)
        assert sent(node)["messages"] == messages
        with pytest.raises(
            openai.BadRequestError, match="image 1 of the request: the image is not valid base64"
        ) as rejected:
            await client.chat.completions.create(model="Org/M", messages=user(TEXT, image("data:image/png;base64,?")))
        assert (rejected.value.code, rejected.value.param) == ("invalid_base64_image", "messages.0.content.1")
        with pytest.raises(openai.BadRequestError, match="fetches no images") as rejected:
            await client.chat.completions.create(model="Org/M", messages=user(image("https://example.com/a.png")))
        assert rejected.value.code == "invalid_image_url"
    assert len(node.bodies) == 1


async def test_image_url_in_a_chat_request_is_fetched_for_the_node(node: FakeNode, server: ImageServer) -> None:
    async with running_cortex(node, settings=fetching(server)) as cortex, openai_client(cortex) as client:
        messages = user(image(server.url, detail="high"), TEXT, image(), image(server.url))
        stream = await client.chat.completions.create(model="Org/M", messages=messages, stream=True, seed=3)
        assert "".join([part.choices[0].delta.content or "" async for part in stream if part.choices]) == "Hello é"
        assert sent(node)["messages"] == user(image(detail="high"), TEXT, image(), image())
        assert (sent(node)["seed"], sent(node)["model"], len(server.requests)) == (3, "Org/M", 1)
        with pytest.raises(openai.BadRequestError, match=r"image 2 .* which images.allowed_hosts does not allow"):
            await client.chat.completions.create(
                model="Org/M", messages=user(image(), image("https://example.com/a.png"))
            )
        await eventually(lambda: not cortex.gateway.bodies.reserved)


async def test_image_repeated_in_a_request_counts_each_time_for_the_size_limit(
    node: FakeNode, server: ImageServer
) -> None:
    """One small request must not become a body above the limit."""

    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(body=PNG + bytes(1 << 20))

    server.respond = respond
    async with running_cortex(node, settings=fetching(server)) as cortex, openai_client(cortex) as client:
        await client.chat.completions.create(model="Org/M", messages=user(image(server.url)))
        with pytest.raises(openai.APIStatusError) as rejected:
            await client.chat.completions.create(model="Org/M", messages=user(*[image(server.url)] * 2))
        assert (rejected.value.status_code, rejected.value.code) == (413, "request_too_large")
        await eventually(lambda: not cortex.gateway.bodies.reserved)
    assert len(node.bodies) == 1


async def test_image_urls_in_a_responses_request_are_fetched(node: FakeNode, server: ImageServer) -> None:
    async with running_cortex(node, settings=fetching(server)) as cortex, openai_client(cortex) as client:
        picture = {"type": "input_image", "image_url": server.url, "detail": "original"}
        items: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "Look."}, picture]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [picture]},
        ]
        await client.responses.create(model="Org/M", input=items)
        fetched = picture | {"image_url": PNG_URL}
        assert sent(node)["input"] == [
            items[0] | {"content": [items[0]["content"][0], fetched]},
            items[1],
            items[2] | {"output": [fetched]},
        ]
        with pytest.raises(openai.BadRequestError, match="helexa stores no files") as rejected:
            stored = {"type": "input_image", "file_id": "file-1", "detail": "auto"}
            await client.responses.create(model="Org/M", input=user(stored))
        assert (rejected.value.code, rejected.value.param) == ("unsupported_parameter", "input.0.content.0.file_id")


async def test_image_urls_in_a_messages_request_are_fetched(node: FakeNode, server: ImageServer) -> None:
    """Images in messages and in tool results, as base64 and as URLs."""
    async with running_cortex(node, settings=fetching(server)) as cortex, talking(cortex) as client:
        remote = {"type": "image", "source": {"type": "url", "url": server.url}}
        inline = {"type": "image", "source": SOURCE}
        messages: Any = [
            *user(TEXT, inline, remote),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
            *user({"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, remote]}),
        ]
        answer = await client.messages.create(model="Org/M", max_tokens=8, messages=messages)
        assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (4, 3)
        assert sent(node)["messages"][0]["content"] == [TEXT, image(), image()]
        assert sent(node)["messages"][2] == {"role": "tool", "tool_call_id": "t1", "content": [TEXT, image()]}
        for source, problem in (
            (
                SOURCE | {"media_type": "image/tiff"},
                "image 1 of the request: the image has the media type 'image/tiff'",
            ),
            ({"type": "url", "url": "http://10.0.0.1/a.png"}, "image 1 of the request: the image URL has the host"),
            ({"type": "file", "file_id": "f"}, "must be 'base64' or 'url'"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=problem) as rejected:
                await client.messages.create(
                    model="Org/M", max_tokens=8, messages=user({"type": "image", "source": source})
                )
            body: Any = rejected.value.body
            assert body["error"]["type"] == "invalid_request_error"
    assert len(node.bodies) == 1


async def test_count_tokens_includes_images(node: FakeNode, server: ImageServer) -> None:
    async def count(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response({"count": 300, "max_model_len": 4096, "tokens": []})

    node.speak = count
    remote: Any = {"type": "image", "source": {"type": "url", "url": server.url}}
    async with running_cortex(node, settings=fetching(server), models=[{"id": "Org/Cold"}]) as cortex:
        async with talking(cortex) as client:
            counted = await client.messages.count_tokens(model="Org/M", messages=user(TEXT, remote))
            assert (counted.input_tokens, sent(node)["messages"]) == (300, user(TEXT, image()))
            estimate = await client.messages.count_tokens(model="Org/Cold", messages=user(remote, remote))
            assert 0 <= estimate.input_tokens - 2 * TYPICAL_TOKENS < 10
        for path, field in (("/tokenize", "messages"), ("/v1/responses/input_tokens", "input")):
            parts = {"messages": image(server.url), "input": {"type": "input_image", "image_url": server.url}}
            body = {"model": "Org/M", field: user(parts[field])}
            async with cortex.client.post(cortex.url + path, json=body) as response:
                assert (await response.json())["count"] == 300
            assert server.url not in node.bodies[-1].decode() and PNG_URL in node.bodies[-1].decode()


TEXT_ONLY = [
    ({"capabilities": ["text"]}, {}),
    ({}, {"models": [{"id": "Org/M", "capabilities": ["text"]}]}),
    ({"capabilities": ["text"]}, {"models": [{"id": "Org/M", "capabilities": ["text", "vision"]}]}),
]


@pytest.mark.parametrize(("report", "catalog"), TEXT_ONLY)
async def test_request_with_an_image_for_a_text_model_is_rejected(
    report: dict[str, Any], catalog: dict[str, Any]
) -> None:
    async with (
        FakeNode().holds("Org/M", **report).serving() as node,
        running_cortex(node, **catalog) as cortex,
        openai_client(cortex) as client,
        talking(cortex) as claude,
    ):
        with pytest.raises(openai.BadRequestError) as rejected:
            await client.chat.completions.create(model="Org/M", messages=user(TEXT, image("https://unfetched")))
        assert rejected.value.code == "vision_unsupported"
        with pytest.raises(openai.BadRequestError) as rejected:
            await client.responses.create(
                model="Org/M", input=user({"type": "input_image", "image_url": PNG_URL, "detail": "auto"})
            )
        assert rejected.value.code == "vision_unsupported"
        inline: Any = {"type": "image", "source": SOURCE}
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            await claude.messages.count_tokens(model="Org/M", messages=user(inline))
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            await claude.messages.create(model="Org/M", messages=user(inline), max_tokens=8)
        answer = await client.chat.completions.create(
            model="Org/M", messages=user({"type": "text", "text": '{"type": "image_url", "image_url": "x"}'})
        )
        assert answer.choices[0].message.content == "Hello"
        assert len(node.bodies) == 1


async def test_cold_text_model_is_not_loaded_for_an_image() -> None:
    cold = {"id": "Org/Cold", "capabilities": ["text"]}
    async with (
        FakeNode().serving() as node,
        running_cortex(node, models=[cold, {"id": "Org/Unknown"}]) as cortex,
    ):
        status, answer = await cortex.ask("Org/Cold", messages=user(image()))
        assert (status, answer["error"]["code"], node.loads) == (400, "vision_unsupported", [])
        status, _ = await cortex.ask("Org/Unknown", messages=user(image()))
        assert (status, len(node.loads)) == (200, 1)


async def test_requests_with_images_go_only_to_the_node_whose_model_has_vision(node: FakeNode) -> None:
    async with (
        FakeNode("n2").holds("Org/M", capabilities=["text"]).serving() as other,
        running_cortex(node, other) as cortex,
    ):
        entry = await cortex.get("/v1/models/Org/M")
        assert sorted(entry["capabilities"]) == ["text", "vision"]
        for number in range(8):
            assert (await cortex.ask(messages=user(image(), {"type": "text", "text": str(number)})))[0] == 200
    assert other.bodies == []


async def test_model_list_states_whether_models_have_vision(node: FakeNode) -> None:
    models = [{"id": "Org/Text", "capabilities": ["text"]}, {"id": "Org/Unknown"}]
    async with running_cortex(node, models=models) as cortex, talking(cortex) as client:
        entries = {entry["id"]: entry for entry in (await cortex.get("/v1/models"))["data"]}
        sees: dict[str, bool | None] = {}
        async for model in client.models.list():
            TypeAdapter(ModelInfo).validate_python(model.to_dict())
            sees[model.id] = model.capabilities.image_input.supported if model.capabilities else None
    assert {id: entry["capabilities"] for id, entry in entries.items()} == {
        "Org/M": ["text", "vision"],
        "Org/Text": ["text"],
        "Org/Unknown": [],
    }
    assert sees == {"Org/M": True, "Org/Text": False, "Org/Unknown": None}


async def test_third_party_backend_gets_fetched_images_as_data_urls(node: FakeNode, server: ImageServer) -> None:
    neurons = [{"name": "n1", "endpoint": node.url, "kind": "openai"}]
    async with running_cortex(node, settings=fetching(server) | {"neurons": neurons}) as cortex:
        assert (await cortex.ask(messages=user(image(server.url))))[0] == 200
    assert sent(node)["messages"] == user(image())


def keyed(**terms: Any) -> dict[str, Any]:
    key = {"key": KEY, "account_id": "acme", "key_id": "acme", **terms}
    return {"entitlements": {"require_auth": True, "keys": [key]}}


async def test_budget_reserves_estimated_image_tokens_instead_of_base64_bytes(node: FakeNode) -> None:
    """An image of 1.6 MB of base64 costs at most `IMAGE_TOKENS`, and is charged what the node reports."""
    reserved: list[int] = []

    async def observe(node: FakeNode, request: web.Request) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"count": 9000})
        reserved.extend(one.tokens for one in cortex.gateway.ledger._group_commit.budgets.open.values())
        return web.Response(body=COMPLETION, content_type="application/json")

    node.speak = observe
    async with running_cortex(node, settings=keyed(hard_cap=CAP)) as cortex, openai_client(cortex) as client:
        await client.chat.completions.create(model="Org/M", messages=user(image(LARGE)), max_tokens=100)
        assert IMAGE_TOKENS < reserved[0] < IMAGE_TOKENS + 1000
        await eventually(lambda: not cortex.gateway.ledger.open)
        budget = await cortex.gateway.ledger.budget(cortex.gateway.authenticator.static[0].principal)
        assert budget.spent == 9
        with pytest.raises(openai.RateLimitError) as rejected:
            await client.chat.completions.create(model="Org/M", messages=user(*[image()] * 3), max_tokens=2000)
        assert rejected.value.code == "insufficient_quota"


async def test_rate_limit_counts_estimated_image_tokens(node: FakeNode) -> None:
    settings = keyed(tokens_per_minute=2 * TYPICAL_TOKENS)
    async with running_cortex(node, settings=settings) as cortex, openai_client(cortex) as client:
        await client.chat.completions.create(model="Org/M", messages=user(image(LARGE)), max_tokens=100)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="Org/M", messages=user(*[UNKNOWN_SIZE] * 3), max_tokens=1)
    assert len(node.bodies) == 1


async def test_large_body_with_images_is_checked_in_a_worker_process(node: FakeNode) -> None:
    settings = {"gateway": {"max_body_mb": 16}}
    huge = "data:image/png;base64," + base64.b64encode(bytes(4 << 20)).decode()
    async with running_cortex(node, settings=settings) as cortex, openai_client(cortex) as client:
        await client.chat.completions.create(model="Org/M", messages=user(image(huge)))
        assert sent(node)["messages"] == user(image(huge))
        with pytest.raises(openai.BadRequestError) as rejected:
            await client.chat.completions.create(
                model="Org/M", messages=user(image(huge), image("data:image/png;base64,!"))
            )
        assert rejected.value.code == "invalid_base64_image"


async def test_settings_for_images_are_reloaded_without_a_restart(cortex: Cortex, server: ImageServer) -> None:
    gateway = cortex.gateway
    assert (await cortex.ask(messages=user(image(server.url))))[0] == 400
    images = gateway.config.images.model_validate(fetching(server)["images"])
    gateway.configure(gateway.config.model_copy(update={"images": images}), gateway.catalog)
    assert (await cortex.ask(messages=user(image(server.url))))[0] == 200


async def test_disconnect_of_the_client_ends_the_fetch_of_its_image(node: FakeNode, server: ImageServer) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    server.respond = respond
    async with running_cortex(node, settings=fetching(server)) as cortex:
        request = asyncio.create_task(cortex.ask(messages=user(image(server.url))))
        await asyncio.wait_for(began.wait(), 20)
        request.cancel()
        await asyncio.wait_for(ended.wait(), 20)
    assert node.bodies == []
