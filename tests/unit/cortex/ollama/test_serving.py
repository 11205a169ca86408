"""Ollama's API at a real gateway in front of a fake node."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cortex import fake_node
from cortex.anthropic.conversation_node import STREAM, streams
from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, listening, running_cortex
from helexa.core.errors import ConfigError
from helexa.cortex.access.proxies_exposure_and_cors import check_exposure
from helexa.cortex.app import create_app
from helexa.cortex.config import CortexConfig
from helexa.cortex.routes.ollama_and_keep_alive import OllamaAddress
from helexa.http.listener import Listener

HI = [{"role": "user", "content": "Hi"}]
KEYS = [
    {"key": "user", "account_id": "acme", "key_id": "user", "models": ["Org/M"]},
    {"key": "boss", "account_id": "boss", "role": "admin"},
]


@pytest.fixture
async def plain() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without a content type, as in Ollama's examples for curl."""
    async with aiohttp.ClientSession() as client:
        yield client


@pytest.fixture
async def keyed(node: FakeNode) -> AsyncIterator[Cortex]:
    """A gateway that requires keys, and has a second model in its catalog."""
    settings = {"entitlements": {"require_auth": True, "keys": KEYS}}
    async with running_cortex(node, settings=settings, models=[{"id": "Org/M"}, {"id": "Org/Cold"}]) as cortex:
        yield cortex


async def post(cortex: Cortex, path: str, key: str | None = None, **fields: Any) -> tuple[int, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with cortex.client.post(cortex.url + path, json={"model": "Org/M", **fields}, headers=headers) as response:
        return response.status, json.loads((await response.read()).splitlines()[-1])


async def tags(cortex: Cortex, key: str = "") -> list[dict[str, Any]]:
    async with cortex.client.get(f"{cortex.url}/api/tags", headers={"authorization": f"Bearer {key}"}) as response:
        return (await response.json())["models"]


async def test_api_chat_is_answered_with_a_stream_of_json_lines(
    node: FakeNode, cortex: Cortex, plain: aiohttp.ClientSession
) -> None:
    node.speak = streams(*STREAM)
    body = json.dumps({"model": "small:latest", "messages": HI, "options": {"num_ctx": 1, "top_k": 3}})
    async with plain.post(f"{cortex.url}/api/chat", data=body) as response:
        assert response.content_type == "application/x-ndjson"
        assert response.headers["x-helexa-ignored"] == "num_ctx"
        parts = [json.loads(line) for line in (await response.read()).splitlines()]
    assert "".join(part["message"]["content"] for part in parts) == "Hello é"
    assert (parts[-1]["done"], parts[-1]["model"], parts[-1]["eval_count"]) == (True, "small:latest", 9)
    sent = json.loads(node.bodies[0])
    assert (sent["model"], sent["top_k"], sent["stream_options"]) == ("Org/M", 3, {"include_usage": True})


async def test_request_of_a_web_page_without_json_content_type_is_415(
    cortex: Cortex, plain: aiohttp.ClientSession
) -> None:
    for headers, status in (({"origin": cortex.url}, 415), ({"sec-fetch-site": "cross-site"}, 415), ({}, 200)):
        async with plain.post(f"{cortex.url}/api/show", data=b'{"model": "small"}', headers=headers) as response:
            assert response.status == status


async def test_api_generate_and_api_embed_reach_the_matching_endpoints_of_the_node(
    node: FakeNode, cortex: Cortex
) -> None:
    paths: list[str] = []

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        data = [{"index": 0, "embedding": [0.5]}]
        completion = {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": fake_node.USAGE}
        return web.json_response({"data": data} if request.path == "/v1/embeddings" else completion)

    node.speak = speak
    status, answer = await post(cortex, "/api/generate", prompt="a", raw=True, stream=False)
    assert (status, answer["response"], answer["eval_count"]) == (200, "b", 2)
    assert (await post(cortex, "/api/embed", input="a"))[1]["embeddings"] == [[0.5]]
    assert await post(cortex, "/api/embeddings", prompt="a") == (200, {"embedding": [0.5]})
    assert paths == ["/v1/completions", "/v1/embeddings", "/v1/embeddings"]

    async def counted() -> bool:
        return await cortex.sample("cortex_requests_total", model="Org/M", node="n1") == 3

    await eventually(counted)


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("/api/chat", {"model": "none", "messages": HI}, 404, "model 'none' not found"),
        ("/api/show", {"model": "none"}, 404, "model 'none' not found"),
        ("/api/generate", {"model": "none"}, 404, "model 'none' not found"),
        ("/api/chat", {"messages": "Hi"}, 400, "messages: "),
        ("/api/generate", {"model": "", "prompt": "a"}, 400, "missing 'model'"),
        ("/api/create", {}, 501, "creates no models"),
        ("/api/push", {}, 501, "uploads no models"),
        ("/api/copy", {}, 501, "alias"),
        ("/v1/systemone", {}, 501, "System One"),
        ("/api/blobs/sha256:0", {}, 501, "model files"),
    ],
)
async def test_ollama_api_errors_are_objects_with_only_an_error_text(
    cortex: Cortex, path: str, fields: dict[str, Any], status: int, message: str
) -> None:
    answered, body = await post(cortex, path, **fields)
    assert (answered, list(body)) == (status, ["error"])
    assert message in body["error"]


async def test_api_delete_is_501_and_names_helexa_rm(cortex: Cortex) -> None:
    async with cortex.client.delete(f"{cortex.url}/api/delete", json={"model": "small"}) as response:
        assert response.status == 501
        assert "helexa rm" in (await response.json())["error"]


async def test_ollama_stream_that_breaks_ends_with_an_error_line(node: FakeNode, cortex: Cortex) -> None:
    node.speak = fake_node.die_within_an_event
    status, last = await post(cortex, "/api/chat", messages=HI)
    assert (status, list(last)) == (200, ["error"])
    assert "ended before it was complete" in last["error"]


async def test_request_from_a_foreign_origin_gets_an_ollama_error_object_with_403(cortex: Cortex) -> None:
    async with cortex.client.get(f"{cortex.url}/api/tags", headers={"origin": "http://evil"}) as response:
        assert response.status == 403
        assert "origin is not allowed" in (await response.json())["error"]


async def test_request_without_a_prompt_loads_a_cold_model_and_responds_after_the_load(node: FakeNode) -> None:
    async with running_cortex(node, models=[{"id": "Org/Cold"}]) as cortex:
        status, answer = await post(cortex, "/api/generate", model="Org/Cold")
        assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")
        assert answer["load_duration"] > 0
        assert [load["model_id"] for load in node.loads] == ["Org/Cold"]
        assert await post(cortex, "/api/embed", model="Org/Cold") == (200, {"model": "Org/Cold", "embeddings": []})


async def test_generate_without_a_prompt_unloads_the_model_if_keep_alive_is_0(node: FakeNode, cortex: Cortex) -> None:
    assert (await post(cortex, "/api/chat", messages=HI, stream=False, keep_alive=-1))[0] == 200
    async with cortex.client.get(f"{cortex.url}/api/ps") as response:
        (model,) = (await response.json())["models"]
    assert (model["name"], model["expires_at"] > "2100") == ("Org/M", True)
    assert (await post(cortex, "/api/generate", keep_alive=0))[1]["done_reason"] == "unload"
    await eventually(lambda: node.unloads == ["Org/M"])
    assert (await cortex.get("/api/ps")) == {"models": []}


async def test_keep_alive_is_forgotten_when_no_node_has_the_model(node: FakeNode, cortex: Cortex) -> None:
    lifecycle = cortex.gateway.lifecycle
    lifecycle.keep("Org/Cold", 0)
    assert lifecycle.snapshot().keep_secs == {}
    lifecycle.keep("Org/M", 60)
    assert lifecycle.snapshot().keep_secs == {"Org/M": 60}
    await lifecycle.unload("Org/M", "n1")
    assert lifecycle.snapshot().keep_secs == {}


async def test_model_is_unloaded_after_the_answer_if_keep_alive_is_0(node: FakeNode, cortex: Cortex) -> None:
    status, answer = await post(cortex, "/api/chat", messages=HI, stream=False, keep_alive="0s")
    assert (status, answer["message"]["content"]) == (200, "Hello")
    await eventually(lambda: node.unloads == ["Org/M"])


async def test_keep_alive_of_a_key_that_is_not_an_admin_key_is_ignored(node: FakeNode, keyed: Cortex) -> None:
    status, body = await post(keyed, "/api/generate", "user", keep_alive=0)
    assert (status, "admin's API key" in body["error"]) == (403, True)
    headers = {"authorization": "Bearer user"}
    chat = {"model": "Org/M", "messages": HI, "stream": False, "keep_alive": 0}
    async with keyed.client.post(f"{keyed.url}/api/chat", json=chat, headers=headers) as response:
        assert (response.status, response.headers["x-helexa-ignored"]) == (200, "keep_alive")
    assert keyed.gateway.lifecycle.snapshot().keep_secs == {}
    assert (await post(keyed, "/api/generate", "boss", keep_alive=0))[0] == 200
    await eventually(lambda: node.unloads == ["Org/M"])


async def test_keep_alive_of_0_does_not_unload_a_pinned_model(node: FakeNode) -> None:
    async with running_cortex(node, models=[{"id": "Org/M", "pinned_on": ["n1"]}]) as cortex:
        status, body = await post(cortex, "/api/generate", keep_alive=0)
        assert (status, "pinned" in body["error"]) == (409, True)


async def test_unloading_a_model_of_a_third_party_backend_is_rejected(node: FakeNode) -> None:
    neurons = [{"name": "n1", "endpoint": node.url, "kind": "openai"}]
    async with running_cortex(node, settings={"neurons": neurons}) as cortex:
        status, body = await post(cortex, "/api/generate", keep_alive=0)
        assert (status, "third-party backend" in body["error"]) == (409, True)
        assert (await post(cortex, "/api/chat", messages=HI, stream=False))[1]["done_reason"] == "stop"


async def test_api_key_with_a_model_list_lists_and_shows_only_these_models(keyed: Cortex) -> None:
    assert [model["name"] for model in await tags(keyed, "user")] == ["Org/M"]
    assert {model["name"] for model in await tags(keyed, "boss")} == {"Org/M", "Org/Cold"}
    assert (await post(keyed, "/api/show", "user", model="Org/Cold"))[0] == 404
    assert (await post(keyed, "/api/chat", "user", model="Org/Cold", messages=HI))[0] == 403
    assert (await post(keyed, "/api/generate", "user", model="Org/Cold"))[0] == 403
    for path in ("/api/tags", "/api/ps"):
        async with keyed.client.get(keyed.url + path) as response:
            assert (response.status, list(await response.json())) == (401, ["error"])


async def test_api_tags_show_and_ps_return_the_properties_of_models_that_nodes_report(node: FakeNode) -> None:
    node.models[0] |= {"limit": {"context": 4096}, "tool_call": True, "capabilities": ["text", "vision"]}
    node.models[0] |= {"quant": "q8_0", "vram_used_mb": 3, "devices": [0]}
    async with running_cortex(node, aliases={"small": "Org/M"}) as cortex:
        (model, alias) = await tags(cortex)
        assert (model["name"], model["model"], alias["name"]) == ("Org/M", "Org/M", "small")
        assert (model["size"], model["details"]["quantization_level"]) == (3 << 20, "q8_0")
        assert model["digest"] == alias["digest"] and len(model["digest"]) == 64
        status, shown = await post(cortex, "/api/show", name="small", model=None)
        assert (status, shown["capabilities"]) == (200, ["completion", "tools", "vision"])
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == 4096
        (running,) = (await cortex.get("/api/ps"))["models"]
        assert (running["size_vram"], running["context_length"]) == (3 << 20, 4096)


async def test_api_show_of_a_model_that_is_not_loaded_returns_the_properties_of_its_files(node: FakeNode) -> None:
    files: dict[str, Any] = {"form": "Q4_K_M", "size_bytes": 5000, "architecture": "qwen3", "parameters": 7_615_616_512}
    files |= {"capabilities": ["text", "vision"], "tool_call": True, "reasoning": True}
    node.stores("Org/Cold", **files, context=4096, modified=1_700_000_000)
    async with running_cortex(node, settings={"gateway": {"local_models": True}}) as cortex:
        cold = next(model for model in await tags(cortex) if model["name"] == "Org/Cold")
        details = {"parent_model": "", "format": "gguf", "family": "qwen3", "families": ["qwen3"]}
        assert cold["details"] == details | {"parameter_size": "7.6B", "quantization_level": "Q4_K_M"}
        assert cold["capabilities"] == ["completion", "tools", "vision", "thinking"]
        assert (cold["size"], cold["modified_at"]) == (5000, "2023-11-14T22:13:20Z")
        assert (await post(cortex, "/api/generate", model="Org/Cold"))[1]["done_reason"] == "load"
        assert (await cortex.get("/api/ps"))["models"][-1]["digest"] == cold["digest"]
        _, shown = await post(cortex, "/api/show", model="org/cold:latest")
        assert shown["model_info"] == {
            "general.architecture": "qwen3",
            "general.basename": "Cold",
            "general.parameter_count": 7_615_616_512,
            "qwen3.context_length": 4096,
        }


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway ask nodes for the progress of downloads more often."""
    monkeypatch.setattr("helexa.cortex.lifecycle.pulls.FOLLOW_SECS", 0.01)


async def pulled(cortex: Cortex, node: FakeNode, model: str, **ending: Any) -> list[dict[str, Any]]:
    """Pull a model, end the download on the node with the state `ending`, and return all lines."""
    async with cortex.client.post(f"{cortex.url}/api/pull", json={"model": model}) as response:
        lines = [json.loads(await response.content.readline())]
        node.pulls[-1] |= {"done": 5, "total": 20}
        while "total" not in lines[-1]:
            lines.append(json.loads(await response.content.readline()))
        node.pulls[-1] |= ending
        return [*lines, *(json.loads(line) for line in (await response.read()).splitlines())]


@pytest.mark.usefixtures("quick")
async def test_api_pull_reports_the_progress_of_the_download(node: FakeNode) -> None:
    node.stores("Org/Old")
    async with running_cortex(node, settings={"ollama": {"anyone_pulls": True}}) as cortex:
        lines = await pulled(cortex, node, "Org/New:latest", status="done", done=20)
        progress = next(line for line in lines if "total" in line)
        assert progress.pop("digest").startswith("sha256:")
        assert progress == {"status": "download Org/New", "total": 20, "completed": 5}
        assert (lines[0], lines[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
        last = (await pulled(cortex, node, "Org/Bad", status="failed", error="no such repository"))[-1]
        assert last == {"error": "node 'n1' has not downloaded model 'Org/Bad': no such repository"}
        await pulled(cortex, node, "qwen3:0.6b", status="done")
    assert [pull["model"] for pull in node.pulls] == ["Org/New", "Org/Bad", "Qwen/Qwen3-0.6B-GGUF:Q8_0"]


@pytest.mark.usefixtures("quick")
async def test_api_pull_without_a_stream_responds_after_the_download(node: FakeNode) -> None:
    node.stores("Org/Old")
    async with running_cortex(node, settings={"ollama": {"anyone_pulls": True}}) as cortex:
        for model, status, ending in (("Org/A", 200, {"status": "done"}), ("Org/B", 502, {"status": "canceled"})):
            asked = asyncio.create_task(post(cortex, "/api/pull", model=model, stream=False))
            await eventually(lambda: node.pulls and node.pulls[-1]["status"] == "running")
            node.pulls[-1] |= ending
            assert (await asked)[0] == status


async def test_api_pull_needs_an_admin_key_unless_a_node_has_the_model(node: FakeNode, keyed: Cortex) -> None:
    node.stores("Org/Old")
    for key, status in (("user", 403), (None, 401)):
        answered, body = await post(keyed, "/api/pull", key, model="Org/New")
        assert (answered, list(body)) == (status, ["error"])
    assert await post(keyed, "/api/pull", "user") == (200, {"status": "success"})
    async with running_cortex(node) as cortex:
        answered, body = await post(cortex, "/api/pull", model="Org/New")
        assert (answered, "helexa pull" in body["error"]) == (401, True)
        assert await post(cortex, "/api/pull", stream=False) == (200, {"status": "success"})
    assert node.pulls == []


async def test_short_name_of_a_downloaded_model_works_in_requests(node: FakeNode) -> None:
    node.stores("Qwen/Qwen3-0.6B-GGUF", names=["Qwen/Qwen3-0.6B-GGUF:Q8_0"])
    async with running_cortex(node, settings={"gateway": {"local_models": True}}) as cortex:
        for name in ("qwen3:0.6b", "qwen3:0.6b:latest", "hf.co/Qwen/Qwen3-0.6B-GGUF"):
            assert (await post(cortex, "/api/chat", model=name, messages=HI, stream=False))[0] == 200
            assert (await post(cortex, "/api/show", model=name))[0] == 200
        assert [load["model_id"] for load in node.loads] == ["Qwen/Qwen3-0.6B-GGUF"]


async def test_ollama_api_can_be_disabled(node: FakeNode) -> None:
    async with running_cortex(node, settings={"ollama": {"enabled": False}}) as cortex:
        for path in ("/api/chat", "/api/show", "/api/create"):
            status, body = await post(cortex, path, messages=HI)
            assert (status, "disabled" in body["error"]) == (404, True)
        assert "disabled" in (await cortex.get("/api/version"))["error"]


async def test_web_page_of_an_allowed_origin_can_use_every_ollama_path(node: FakeNode) -> None:
    origin = {"origin": "https://ui.example"}
    async with running_cortex(node, settings={"gateway": {"cors_origins": ["https://ui.example"]}}) as cortex:
        for path in ("/api/tags", "/api/ps", "/api/version"):
            async with cortex.client.get(cortex.url + path, headers=origin) as response:
                assert (response.status, response.headers["access-control-allow-origin"]) == (200, "https://ui.example")
        chat = {"model": "Org/M", "messages": HI, "stream": False}
        async with cortex.client.post(f"{cortex.url}/api/chat", json=chat, headers=origin) as response:
            assert (response.status, response.headers["access-control-allow-origin"]) == (200, "https://ui.example")


async def test_second_address_for_ollama_clients_imitates_an_ollama_server(node: FakeNode, cortex: Cortex) -> None:
    app = OllamaAddress(create_app(cortex.gateway))
    async with listening(Listener(app)) as url, cortex.client.get(url, headers={"accept": "text/html"}) as response:
        assert (response.status, await response.text()) == (200, "Ollama is running")
        async with cortex.client.head(url) as head:
            assert head.status == 200
        async with cortex.client.get(f"{url}/api/version") as version:
            major, minor, _ = (await version.json())["version"].split(".")
        assert (int(major), int(minor)) >= (0, 6)  # Copilot accepts no older version


def test_second_address_on_the_network_without_keys_is_a_configuration_error() -> None:
    config = CortexConfig.model_validate({"ollama": {"listen": "0.0.0.0:11434"}})
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:11434 is reachable"):
        check_exposure(config)


async def test_streaming_request_gets_parts_without_text_while_its_model_loads(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helexa.cortex.forwarding.relay_and_keep_alive.KEEP_ALIVE_AFTER_SECS", 0.01)
    node.may_load.clear()
    node.speak = streams(*STREAM)
    async with running_cortex(node, models=[{"id": "Org/Cold"}]) as cortex:
        body = {"model": "Org/Cold", "messages": HI}
        async with cortex.client.post(f"{cortex.url}/api/chat", json=body) as response:
            first = json.loads(await response.content.readline())
            assert (first["message"], first["done"]) == ({"role": "assistant", "content": ""}, False)
            node.may_load.set()
            rest = [json.loads(line) for line in (await response.read()).splitlines()]
    assert "".join(part["message"]["content"] for part in rest) == "Hello é"


async def test_large_ollama_conversation_is_translated_in_a_worker_process(node: FakeNode, cortex: Cortex) -> None:
    messages = [{"role": "user", "content": "Hi"}] * 12_000
    status, answer = await post(cortex, "/api/chat", messages=messages, stream=False)
    assert (status, answer["message"]["content"]) == (200, "Hello")
    assert len(json.loads(node.bodies[0])["messages"]) == 12_000
