"""Servers of the OpenAI dialect as members of the fleet: what each kind says, as recorded answers on real sockets."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cortex.fake_node import ANSWER
from cortex.running import eventually, running_cortex
from helexa.core.fleet import ModelInfo
from helexa.cortex.config import NeuronSection
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.poller import Poller

VLLM_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 3.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-8B"} 1.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 2.0
vllm:num_requests_waiting{engine="0",model_name="somebody else"} 9.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="Qwen/Qwen3-8B"} 9.0
"""


@dataclass
class Server:
    """Answers from a script, by path; a dictionary's `POST` answers are functions of the request's JSON."""

    answers: dict[str, Any]
    key: str | None = None
    url: str = ""
    asked: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Server"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.polled_paths.append(request.path)
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        answer = self.answers.get(request.path)
        if answer is None:
            return web.Response(status=404)
        if callable(answer):
            answer = answer(await request.json())
        return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)


def listing(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": [{"object": "model", "created": 1, **entry} for entry in entries]}


@asynccontextmanager
async def watched(server: Server, bearer: str | None = None) -> AsyncIterator[tuple[Fleet, Poller]]:
    async with server.serving(), aiohttp.ClientSession() as session:
        section = {"name": "box", "endpoint": server.url, "kind": "openai", "bearer": bearer}
        fleet = Fleet([NeuronSection.model_validate(section)])
        yield fleet, Poller(fleet, NodeClient(session), 1.0)


async def models(server: Server) -> dict[str, ModelInfo]:
    async with watched(server) as (fleet, poller):
        await poller.poll("box")
        assert fleet.node("box").healthy
        return dict(fleet.node("box").models)


def context(info: ModelInfo) -> int | None:
    assert (info.status, info.servable) == ("loaded", None)
    return info.limit.context if info.limit else None


async def test_vllm_says_its_limit_and_how_busy_it_is() -> None:
    entry = {"id": "Qwen/Qwen3-8B", "owned_by": "vllm", "max_model_len": 40960}
    server = Server({"/v1/models": listing(entry), "/metrics": VLLM_METRICS})
    async with watched(server) as (fleet, poller):
        with fleet.request("box", "Qwen/Qwen3-8B"):
            await poller.poll("box")
        node = fleet.node("box")
        assert context(node.models["Qwen/Qwen3-8B"]) == 40960
        assert node.others == {"Qwen/Qwen3-8B": 5}  # six there, one of them ours
        assert node.url("Qwen/Qwen3-8B") == server.url


async def test_llama_cpp_says_the_context_of_a_slot() -> None:
    entry = {"id": "model.gguf", "owned_by": "llamacpp", "meta": {"n_ctx_train": 131072, "n_vocab": 5}}
    props = {"default_generation_settings": {"n_ctx": 8192}, "total_slots": 4, "modalities": {"vision": True}}
    found = await models(Server({"/v1/models": listing(entry), "/props": props}))
    assert (context(found["model.gguf"]), found["model.gguf"].capabilities) == (8192, ["text", "vision"])
    without_props = await models(Server({"/v1/models": listing(entry)}))
    assert context(without_props["model.gguf"]) == 131072


async def test_ollama_says_what_a_model_can_do_and_the_context_it_really_has() -> None:
    def show(asked: dict[str, str]) -> dict[str, Any]:
        vision = asked["model"] == "gemma3:4b"
        return {
            "model_info": {"general.architecture": "x", "x.context_length": 131072},
            "capabilities": ["completion", "tools", *(["vision"] if vision else ["thinking"])],
        }

    server = Server(
        {
            "/v1/models": listing(
                {"id": "gemma3:4b", "owned_by": "library"}, {"id": "bob/own:latest", "owned_by": "bob"}
            ),
            "/api/ps": {"models": [{"name": "gemma3:4b", "context_length": 4096}]},
            "/api/show": show,
        }
    )
    async with watched(server) as (fleet, poller):
        for _ in range(3):
            await poller.poll("box")
        found = fleet.node("box").models
        assert (context(found["gemma3:4b"]), context(found["bob/own:latest"])) == (4096, 131072)
        assert found["gemma3:4b"].capabilities == ["text", "vision"] and found["gemma3:4b"].tool_call
        assert found["bob/own:latest"].reasoning and not found["gemma3:4b"].reasoning
        assert server.polled_paths.count("/api/show") == 2  # once a model
        del server.answers["/api/ps"]
        await poller.poll("box")
        assert context(fleet.node("box").models["gemma3:4b"]) == 4096
        assert "/api/v0/models" not in server.polled_paths


async def test_lm_studio_says_the_context_it_loaded_with() -> None:
    studio = [
        {"id": "llama", "type": "llm", "state": "loaded", "max_context_length": 131072, "loaded_context_length": 4096},
        {"id": "nomic", "type": "embeddings", "state": "not-loaded", "max_context_length": 2048},
    ]
    plain = listing({"id": "llama", "owned_by": "organization_owner"}, {"id": "nomic"})
    server = Server({"/v1/models": plain, "/api/v0/models": {"object": "list", "data": studio}})
    async with watched(server) as (fleet, poller):
        await poller.poll("box")
        await poller.poll("box")
        found = fleet.node("box").models
        assert (context(found["llama"]), context(found["nomic"])) == (4096, 2048)
        assert (found["llama"].capabilities, found["nomic"].capabilities) == (["text"], ["embedding"])
        assert server.polled_paths.count("/api/ps") == 1


async def test_any_other_server_is_asked_what_it_is_once() -> None:
    server = Server({"/v1/models": listing({"id": "gpt"}, {"id": "other"})})
    async with watched(server) as (fleet, poller):
        for _ in range(3):
            await poller.poll("box")
        assert [context(info) for info in fleet.node("box").models.values()] == [None, None]
    assert server.polled_paths.count("/v1/models") == 3
    assert len(server.polled_paths) == 5


@pytest.mark.parametrize("answer", ["", "null", "[]", "{}", '{"data": 7}', '{"data": ["a"]}', "<html>"])
async def test_garbage_is_a_miss(answer: str) -> None:
    async with watched(Server({"/v1/models": answer})) as (fleet, poller):
        await poller.poll("box")
        assert (fleet.node("box").healthy, fleet.node("box").misses) == (False, 1)


async def test_what_makes_no_sense_is_left_out() -> None:
    entries = [{"id": 7}, {"owned_by": "x"}, {"id": "ok", "max_model_len": -5}, {"id": "odd", "max_model_len": "many"}]
    found = await models(Server({"/v1/models": listing(*entries), "/metrics": "nonsense \xff{"}))
    assert {name: context(info) for name, info in found.items()} == {"ok": None}
    assert await models(Server({"/v1/models": {"object": "list", "data": None}})) == {}
    wild = {"/v1/models": listing({"id": "m"}), "/api/ps": {"models": [{"name": "m", "context_length": "x"}]}}
    assert list(await models(Server(wild))) == ["m"]


async def test_the_key_of_a_node_is_sent_to_it_and_shown_to_nobody() -> None:
    server = Server({"/v1/models": listing({"id": "m"})}, key="s3cret")
    async with watched(server, bearer="s3cret") as (fleet, poller):
        await poller.poll("box")
        assert fleet.node("box").healthy
        assert fleet.bearer("box") == "s3cret"
        assert "s3cret" not in repr(fleet.view())
        fleet.configure([])
        assert fleet.bearer("box") is None
    async with watched(server) as (fleet, poller):
        await poller.poll("box")
        assert not fleet.node("box").healthy


async def test_a_gateway_serves_the_models_of_such_a_node_under_its_key_and_under_an_alias() -> None:
    def speak(asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["model"] == "qwen3:8b"
        return json.loads(ANSWER)

    server = Server({"/v1/models": listing({"id": "qwen3:8b"}), "/v1/chat/completions": speak}, key="s3cret")
    async with server.serving():
        neurons = [{"name": "box", "endpoint": server.url, "kind": "openai", "bearer": "s3cret"}]
        async with running_cortex(ready=False, settings={"neurons": neurons}, aliases={"small": "qwen3:8b"}) as cortex:
            await eventually(lambda: cortex.gateway.fleet.node("box").healthy)
            assert (await cortex.ask("small"))[0] == (await cortex.ask("qwen3:8b"))[0] == 200
            assert (await cortex.ask("unknown"))[0] == 404
            listed = {entry["id"]: entry["loaded"] for entry in (await cortex.get("/v1/models"))["data"]}
            assert listed == {"qwen3:8b": True, "small": True}
            assert (await cortex.get("/health"))["status"] == "ok"
            assert "s3cret" not in json.dumps(await cortex.get("/api/nodes"))
    assert not [path for path in server.polled_paths if path in ("/models", "/models/load", "/discovery", "/health")]
