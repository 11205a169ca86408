"""OpenAI-compatible servers as nodes: the reports of each kind, from scripted responses on real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from cortex.fake_node import COMPLETION
from cortex.running_gateway import eventually, open_client, running_cortex
from helexa.core.node_reports import ModelInfo
from helexa.cortex.config import NeuronSection
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.poller import Poller

VLLM_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 3.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-8B"} 1.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 2.0
vllm:num_requests_waiting{engine="0",model_name="another model"} 9.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="Qwen/Qwen3-8B"} 9.0
"""


@dataclass
class Server:
    """A server with a scripted response per path.

    A response may be a function of the request's JSON.
    """

    responses: dict[str, Any]
    key: str | None = None
    url: str = ""
    polled_paths: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Server"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._respond)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _respond(self, request: web.Request) -> web.Response:
        self.polled_paths.append(request.path)
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        response = self.responses.get(request.path)
        if response is None:
            return web.Response(status=404)
        if callable(response):
            response = response(await request.json())
        return web.Response(text=response) if isinstance(response, str) else web.json_response(response)


def listing(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": [{"object": "model", "created": 1, **entry} for entry in entries]}


@asynccontextmanager
async def watched(server: Server, bearer: str | None = None) -> AsyncIterator[tuple[Fleet, Poller]]:
    async with server.serving(), open_client() as client:
        section = {"name": "box", "endpoint": server.url, "kind": "openai", "bearer": bearer}
        fleet = Fleet([NeuronSection.model_validate(section)])
        yield fleet, Poller(fleet, client, 1.0)


async def models(server: Server) -> dict[str, ModelInfo]:
    async with watched(server) as (fleet, poller):
        await poller.poll("box")
        assert fleet.node("box").healthy
        return dict(fleet.node("box").models)


def context(info: ModelInfo) -> int | None:
    assert (info.status, info.servable) == ("loaded", None)
    return info.limit.context if info.limit else None


async def test_context_limit_and_load_are_read_from_vllm() -> None:
    entry = {"id": "Qwen/Qwen3-8B", "owned_by": "vllm", "max_model_len": 40960}
    server = Server({"/v1/models": listing(entry), "/metrics": VLLM_METRICS})
    async with watched(server) as (fleet, poller):
        with fleet.request("box", "Qwen/Qwen3-8B"):
            await poller.poll("box")
        node = fleet.node("box")
        assert context(node.models["Qwen/Qwen3-8B"]) == 40960
        assert node.other_requests == {"Qwen/Qwen3-8B": 5}  # six in total, one of them from this gateway
        assert node.url("Qwen/Qwen3-8B") == server.url


async def test_load_of_vllm_is_polled_during_requests_but_its_model_list_is_not() -> None:
    entry = {"id": "Qwen/Qwen3-8B", "owned_by": "vllm", "max_model_len": 40960}
    server = Server({"/v1/models": listing(entry), "/metrics": ""})
    async with watched(server) as (fleet, poller):
        poller.interval_secs = 0.01
        polling = asyncio.create_task(poller.run())
        await eventually(lambda: fleet.node("box").healthy)
        with fleet.request("box", "Qwen/Qwen3-8B"):
            await eventually(lambda: server.polled_paths[-5:] == ["/metrics"] * 5)
            server.responses["/metrics"] = VLLM_METRICS
            await eventually(lambda: fleet.node("box").other_requests == {"Qwen/Qwen3-8B": 5})
            assert server.polled_paths[-5:] == ["/metrics"] * 5
        await eventually(lambda: server.polled_paths[-2:] == ["/v1/models", "/metrics"])
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


async def test_context_limit_of_a_slot_is_read_from_llama_cpp() -> None:
    entry = {"id": "model.gguf", "owned_by": "llamacpp", "meta": {"n_ctx_train": 131072, "n_vocab": 5}}
    props = {"default_generation_settings": {"n_ctx": 8192}, "total_slots": 4, "modalities": {"vision": True}}
    infos = await models(Server({"/v1/models": listing(entry), "/props": props}))
    assert (context(infos["model.gguf"]), infos["model.gguf"].capabilities) == (8192, ["text", "vision"])
    without_props = await models(Server({"/v1/models": listing(entry)}))
    assert context(without_props["model.gguf"]) == 131072


async def test_capabilities_and_actual_context_are_read_from_ollama() -> None:
    def show(request: dict[str, str]) -> dict[str, Any]:
        vision = request["model"] == "gemma3:4b"
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
        infos = fleet.node("box").models
        assert (context(infos["gemma3:4b"]), context(infos["bob/own:latest"])) == (4096, 131072)
        assert infos["gemma3:4b"].capabilities == ["text", "vision"] and infos["gemma3:4b"].tool_call
        assert infos["bob/own:latest"].reasoning and not infos["gemma3:4b"].reasoning
        assert server.polled_paths.count("/api/show") == 2  # once per model
        del server.responses["/api/ps"]
        await poller.poll("box")
        assert context(fleet.node("box").models["gemma3:4b"]) == 4096
        assert "/api/v0/models" not in server.polled_paths


async def test_context_of_the_loaded_model_is_read_from_lm_studio() -> None:
    studio = [
        {"id": "llama", "type": "llm", "state": "loaded", "max_context_length": 131072, "loaded_context_length": 4096},
        {"id": "nomic", "type": "embeddings", "state": "not-loaded", "max_context_length": 2048},
    ]
    plain = listing({"id": "llama", "owned_by": "organization_owner"}, {"id": "nomic"})
    server = Server({"/v1/models": plain, "/api/v0/models": {"object": "list", "data": studio}})
    async with watched(server) as (fleet, poller):
        await poller.poll("box")
        await poller.poll("box")
        infos = fleet.node("box").models
        assert (context(infos["llama"]), context(infos["nomic"])) == (4096, 2048)
        assert (infos["llama"].capabilities, infos["nomic"].capabilities) == (["text"], ["embedding"])
        assert server.polled_paths.count("/api/ps") == 1


async def test_kind_of_a_third_party_server_is_identified_once() -> None:
    server = Server({"/v1/models": listing({"id": "gpt"}, {"id": "other"})})
    async with watched(server) as (fleet, poller):
        for _ in range(3):
            await poller.poll("box")
        assert [context(info) for info in fleet.node("box").models.values()] == [None, None]
    assert server.polled_paths.count("/v1/models") == 3
    assert len(server.polled_paths) == 5


@pytest.mark.parametrize("body", ["", "null", "[]", "{}", '{"data": 7}', '{"data": ["a"]}', "<html>"])
async def test_malformed_model_list_of_a_backend_counts_as_a_missed_poll(body: str) -> None:
    async with watched(Server({"/v1/models": body})) as (fleet, poller):
        await poller.poll("box")
        assert (fleet.node("box").healthy, fleet.node("box").misses) == (False, 1)


async def test_invalid_fields_in_a_model_list_are_ignored() -> None:
    entries = [{"id": 7}, {"owned_by": "x"}, {"id": "ok", "max_model_len": -5}, {"id": "odd", "max_model_len": "many"}]
    infos = await models(Server({"/v1/models": listing(*entries), "/metrics": "nonsense \xff{"}))
    assert {name: context(info) for name, info in infos.items()} == {"ok": None}
    assert await models(Server({"/v1/models": {"object": "list", "data": None}})) == {}
    wild = {"/v1/models": listing({"id": "m"}), "/api/ps": {"models": [{"name": "m", "context_length": "x"}]}}
    assert list(await models(Server(wild))) == ["m"]


async def test_models_with_unprintable_or_very_long_ids_are_not_listed() -> None:
    entries = [{"id": id} for id in ("a\nb", "\x1b[31mred", "rtl\u202e", "x" * 100_000, "", "ok")]
    assert list(await models(Server({"/v1/models": listing(*entries)}))) == ["ok"]


async def test_bearer_is_sent_to_the_backend_and_not_shown() -> None:
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


async def test_models_of_a_third_party_backend_are_served_by_id_and_alias() -> None:
    def speak(request: dict[str, Any]) -> dict[str, Any]:
        assert request["model"] == "qwen3:8b"
        return json.loads(COMPLETION)

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


async def test_unusable_model_ids_of_a_backend_are_skipped_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    ids = ["good/Model-7B:q4 (new)", "", "a\nb", "a\x1b[2J", "a\u202eb", "a\u200bb", "a" * 257, "--exec=x", "b" * 256]
    server = Server({"/v1/models": listing(*({"id": id} for id in ids))})
    async with watched(server) as (fleet, poller):
        await poller.poll("box")
        await poller.poll("box")
        assert [*fleet.node("box").models] == [ids[0], ids[-1]]
    assert len([record for record in caplog.records if "node=box models=2" in record.getMessage()]) == 1
