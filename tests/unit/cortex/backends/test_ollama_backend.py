"""Thinking on a backend that runs Ollama, which knows only `reasoning_effort`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from cortex.fake_node import USAGE, FakeNode
from cortex.running_gateway import Cortex, running_cortex


async def post(cortex: Cortex, path: str, **fields: Any) -> tuple[int, Any]:
    async with cortex.client.post(cortex.url + path, json=fields) as response:
        return response.status, await response.json()


class Ollama:
    """Ollama's routes, with a model that thinks unless the effort is `none`, and one that cannot think."""

    def __init__(self) -> None:
        self.efforts: list[Any] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/api/ps", self.running)
        app.router.add_post("/api/show", self.show)
        app.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": id, "owned_by": "library"} for id in ("qwen3", "gemma2")]}
        )

    async def running(self, request: web.Request) -> web.Response:
        return web.json_response({"models": []})

    async def show(self, request: web.Request) -> web.Response:
        thinking = ["thinking"] if (await request.json())["model"] == "qwen3" else []
        return web.json_response({"model_info": {}, "capabilities": ["completion", *thinking]})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        effort = body.get("reasoning_effort")
        self.efforts.append(effort)
        if effort in ("low", "medium") and body["model"] == "qwen3":
            text = f'think value "{effort}" is not supported for this model'
            return web.json_response({"error": {"message": text, "type": "api_error"}}, status=500)
        if effort not in (None, "none") and body["model"] == "gemma2":
            text = '"gemma2" does not support thinking'
            return web.json_response({"error": {"message": text, "type": "invalid_request_error"}}, status=400)
        thought = {} if effort == "none" or body["model"] == "gemma2" else {"reasoning": "Hm."}
        message = {"role": "assistant", "content": "Hello", **thought}
        return web.json_response(
            {"id": "c1", "choices": [{"message": message, "finish_reason": "stop"}], "usage": USAGE}
        )


async def test_ollama_backend_gets_the_reasoning_effort_that_the_request_implies() -> None:
    ollama = Ollama()
    async with ollama.serving() as url:
        settings = {"neurons": [{"name": "n1", "endpoint": url, "kind": "openai"}]}
        async with running_cortex(FakeNode(url=url), settings=settings) as cortex:
            user = [{"role": "user", "content": "Hi"}]
            for think, thoughts in ((False, None), (True, "Hm."), (None, "Hm.")):
                fields: dict[str, Any] = {"messages": user, "stream": False, "think": think}
                _, answer = await post(cortex, "/api/chat", **fields, model="qwen3")
                assert answer["message"].get("thinking") == thoughts
            message = {"max_tokens": 9, "messages": user}
            _, answer = await post(cortex, "/v1/messages", **message, model="qwen3")
            assert [block["type"] for block in answer["content"]] == ["text"]
            assert ollama.efforts == ["none", None, None, "none"]
            for model in ("qwen3", "gemma2"):
                effort = {"output_config": {"effort": "medium"}, "thinking": {"type": "adaptive"}}
                status, answer = await post(cortex, "/v1/messages", **message, **effort, model=model)
                assert (status, answer["content"][-1]["text"]) == (200, "Hello")
            assert ollama.efforts[4:] == ["medium", None, "medium", None]
            await post(cortex, "/v1/messages", **message, model="qwen3")
            assert ollama.efforts[-1] == "none"
