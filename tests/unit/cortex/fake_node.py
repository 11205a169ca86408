"""A fake node: a real HTTP server on a real socket, whose responses a test scripts."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Speak = Callable[["FakeNode", web.Request], Awaitable[web.StreamResponse]]


def event(**fields: Any) -> bytes:
    record = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "Org/M", "choices": []} | fields
    return b"data: " + json.dumps(record, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str, **delta: str) -> bytes:
    return event(choices=[{"index": 0, "delta": delta | {"content": text}, "finish_reason": None}])


USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 3},
}
ROLE = chunk("", role="assistant")
FINAL = event(usage=USAGE)
DONE = b"data: [DONE]\n\n"
STREAM = [ROLE, chunk("Hel"), b": keep-alive\n\n", chunk("lo é"), FINAL, DONE]
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
COMPLETION = json.dumps(
    {"id": "c1", "object": "chat.completion", "created": 1, "model": "Org/M", "choices": [CHOICE], "usage": USAGE},
    indent=1,
).encode()

RESPONSE_USAGE = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}
RESPONSE_STREAM = [
    b'event: response.output_text.delta\ndata: {"delta":"Hello"}\n\n',
    b'event: response.completed\ndata: {"response":{"usage":%b}}\n\n' % json.dumps(RESPONSE_USAGE).encode(),
]


@dataclass
class FakeNode:
    """The responses that the node sends, and the requests that it received.

    Attributes:
        speak: handler of inference requests.
        polled_paths: paths of the gateway's polls.
        authorizations: Authorization header of each poll and load.
        key: API key that requests must have, or None.
        usages: token counts by usage id.
        can_sleep: whether the node puts models to sleep; older nodes do not.
        keeps: bodies of the requests that change the idle time of a model.
        speaking: number of inference requests in progress.
    """

    name: str = "n1"
    url: str = ""
    discovery: dict[str, Any] = field(default_factory=lambda: {"hostname": "n1", "os": "Linux", "memory_total_mb": 999})
    health: dict[str, Any] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)
    endpoint: str | None = None
    key: str | None = None
    down: bool = False
    speak: "Speak | None" = None
    load_error: tuple[int, Any] | None = None
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer_polls: asyncio.Event = field(default_factory=asyncio.Event)
    loads: list[dict[str, Any]] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    unload_error: tuple[int, Any] | None = None
    sizes_mb: dict[str, int] = field(default_factory=dict)
    local: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[dict[str, Any]] = field(default_factory=list)
    estimated: list[str] = field(default_factory=list)
    vram_total_mb: int = 0
    limit_mb: int = 0
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    polled_paths: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    usages: dict[str, dict[str, int]] = field(default_factory=dict)
    keeps: list[dict[str, Any]] = field(default_factory=list)
    can_sleep: bool = True
    speaking: int = 0
    spoke: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_load.set()
        self.may_answer_polls.set()

    def holds(self, *ids: str, **fields: Any) -> "FakeNode":
        self.models += [{"id": model, "harness": "torch", "status": "loaded", "devices": [], **fields} for model in ids]
        return self

    def stores(self, *ids: str, **fields: Any) -> "FakeNode":
        """Add models to the node's disk."""
        self.local += [{"id": model, "source": f"huggingface:{model}", **fields} for model in ids]
        self.health["local_revision"] = f"r{len(self.local)}"
        return self

    def with_accelerator(self, vram_total_mb: int, sizes_mb: dict[str, int]) -> "FakeNode":
        """Give the node one device, on which each loaded model occupies its size in `sizes_mb`."""
        self.vram_total_mb, self.sizes_mb = vram_total_mb, sizes_mb
        self.discovery["devices"] = [{"index": 0, "name": "GPU", "vram_total_mb": vram_total_mb}]
        return self

    def with_memory_limit(self, limit_mb: int, sizes_mb: dict[str, int]) -> "FakeNode":
        """Run the node's models on the CPU, where they may use `limit_mb` together. Each model uses its size."""
        self.limit_mb, self.sizes_mb = limit_mb, sizes_mb
        self.discovery |= {"memory_limit_mb": limit_mb, "memory_total_mb": 64000}
        return self

    def free_mb(self) -> int:
        return (self.limit_mb or self.vram_total_mb) - sum(
            self.sizes_mb.get(model["id"], 0) for model in self.models if model["status"] not in ("loading", "sleeping")
        )

    def sleeps(self, id: str) -> None:
        """Put a loaded model to sleep. A load request wakes it."""
        self.models = [model | ({"status": "sleeping"} if model["id"] == id else {}) for model in self.models]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Speak) -> web.StreamResponse:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return await handler(request)  # type: ignore[call-arg,arg-type]

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["FakeNode"]:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._guard])
        app.router.add_get("/discovery", self._discovery)
        app.router.add_get("/health", self._health)
        app.router.add_get("/models", self._models)
        app.router.add_get("/models/local", self._local_models)
        app.router.add_post("/models/estimate", self._estimate)
        app.router.add_post("/models/pull", self._pull)
        app.router.add_post("/models/pull/cancel", self._cancel_pull)
        app.router.add_get("/models/pulls", self._list_pulls)
        app.router.add_get("/v1/models", self._list)
        app.router.add_get("/models/{id}/endpoint", self._endpoint)
        app.router.add_post("/models/load", self._load)
        app.router.add_post("/models/unload", self._unload)
        app.router.add_post("/models/keep", self._keep)
        app.router.add_post("/models/sleep", self._sleep)
        app.router.add_delete("/models/{id}/prefix-cache", self._clear_prefix_cache)
        app.router.add_post("/v1/chat/completions", self._speak)
        for path in ("/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/images/generations"):
            app.router.add_post(path, self._speak)
        for path in ("/tokenize", "/detokenize", "/v1/responses/input_tokens", "/v1/responses/compact"):
            app.router.add_post(path, self._speak)
        app.router.add_get("/tokenizer_info", self._speak)
        app.router.add_get("/usage/{id}", self._usage)
        app.router.add_route("*", "/v1/responses/{id}", self._stored_response)
        app.router.add_get("/v1/responses/{id}/input_items", self._stored_response)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _poll(self, request: web.Request, value: Any) -> web.Response:
        self.polled_paths.append(request.rel_url.raw_path)
        self.authorizations.append(request.headers.get("authorization"))
        await self.may_answer_polls.wait()
        return web.Response(status=500) if self.down else web.json_response(value)

    async def _discovery(self, request: web.Request) -> web.Response:
        return await self._poll(request, self.discovery)

    async def _health(self, request: web.Request) -> web.Response:
        if self.limit_mb:
            return await self._poll(request, {"grantable_mb": self.free_mb()} | self.health)
        if not self.vram_total_mb:
            return await self._poll(request, self.health)
        free = self.free_mb()
        devices = [{"index": 0, "vram_used_mb": self.vram_total_mb - free, "vram_free_mb": free}]
        return await self._poll(request, {"devices": devices} | self.health)

    async def _models(self, request: web.Request) -> web.Response:
        return await self._poll(request, list(self.models))

    async def _local_models(self, request: web.Request) -> web.Response:
        report = {"revision": self.health.get("local_revision", ""), "models": self.local, "downloads": True}
        return await self._poll(request, report)

    async def _estimate(self, request: web.Request) -> web.Response:
        self.estimated.append((await request.json())["model_id"])
        return web.json_response({"memory_mb": self.sizes_mb.get(self.estimated[-1])})

    async def _pull(self, request: web.Request) -> web.Response:
        self.pulls.append({"model": (await request.json())["model"], "status": "running", "stage": "download"})
        return web.json_response(self.pulls[-1], status=202)

    async def _cancel_pull(self, request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        for pull in self.pulls:
            if pull["model"] == model and pull["status"] == "running":
                pull["status"] = "canceled"
                return web.json_response(pull)
        return web.json_response({"error": {"message": f"model '{model}' is not being downloaded"}}, status=404)

    async def _list_pulls(self, request: web.Request) -> web.Response:
        return web.json_response({"pulls": self.pulls})

    async def _list(self, request: web.Request) -> web.Response:
        """List the models as a third-party backend does."""
        data = [{"id": model["id"], "object": "model"} for model in self.models]
        return await self._poll(request, {"object": "list", "data": data})

    async def _endpoint(self, request: web.Request) -> web.Response:
        self.polled_paths.append(request.rel_url.raw_path)
        self.authorizations.append(request.headers.get("authorization"))
        return web.json_response({"url": self.endpoint} if self.endpoint else {}, status=200 if self.endpoint else 404)

    async def _load(self, request: web.Request) -> web.Response:
        self.authorizations.append(request.headers.get("authorization"))
        spec = await request.json()
        self.loads.append(spec)
        if self.limit_mb:
            loading = {"id": spec["model_id"], "status": "loading"}
            self.models.append(loading)
            await self.may_load.wait()
            self.models.remove(loading)
        await self.may_load.wait()
        if self.load_error is not None:
            status, body = self.load_error
            return web.json_response(body, status=status)
        needed_mb = self.sizes_mb.get(spec["model_id"], 0)
        if self.limit_mb and needed_mb > self.free_mb():
            reason = {"kind": "does_not_fit", "message": "the model does not fit", "required_mb": needed_mb}
            reason |= {"free_mb": self.free_mb()}
            return web.json_response({"error": reason | {"permanent": needed_mb > self.limit_mb}}, status=422)
        self.models = [model for model in self.models if model["id"] != spec["model_id"]]  # it slept
        self.holds(spec["model_id"], **({"granted_mb": needed_mb} if self.limit_mb else {}))
        return web.json_response({"status": "loaded"})

    async def _unload(self, request: web.Request) -> web.Response:
        model = (await request.json())["model_id"]
        self.unloads.append(model)
        if self.unload_error is not None:
            status, body = self.unload_error
            return web.json_response(body, status=status)
        self.models = [entry for entry in self.models if entry["id"] != model]
        return web.json_response({"status": "unloaded"})

    async def _clear_prefix_cache(self, request: web.Request) -> web.Response:
        model = request.match_info["id"]
        if model not in {entry["id"] for entry in self.models}:
            return web.json_response({"error": f"model '{model}' not found"}, status=404)
        self.cleared.append(model)
        return web.json_response({"status": "cleared", "deleted_bytes": 1000})

    async def _sleep(self, request: web.Request) -> web.Response:
        if not self.can_sleep:
            return web.Response(status=404)
        self.sleeps((await request.json())["model_id"])
        return web.json_response({"status": "sleeping"})

    async def _keep(self, request: web.Request) -> web.Response:
        self.keeps.append(await request.json())
        return web.json_response({})

    async def _usage(self, request: web.Request) -> web.Response:
        """Return the token counts of an interrupted request by its usage id."""
        usage = self.usages.get(request.match_info["id"])
        return web.json_response(usage or {}, status=200 if usage else 404)

    async def _stored_response(self, request: web.Request) -> web.Response:
        """A response that is kept for one key."""
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.down:
            return web.Response(status=500)
        if request.headers.get("x-helexa-key-id") != "capped":
            return web.json_response({"error": {"message": "not found"}}, status=404)
        if request.query.get("limit") == "0":
            return web.json_response({"error": {"message": "limit: must be 1 to 100"}}, status=400)
        by = request.query_string or request.method
        return web.json_response({"id": request.match_info["id"], "object": "response", "by": by})

    async def _speak(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.speaking += 1
        self.spoke.set()
        try:
            return await (self.speak or respond)(self, request)
        finally:
            self.speaking -= 1


async def begin(request: web.Request, *chunks: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-node-says": "hi"})
    await response.prepare(request)
    for data in chunks:
        await response.write(data)
    return response


async def respond(node: FakeNode, request: web.Request) -> web.StreamResponse:
    if (await request.json()).get("stream"):
        return await begin(request, *(RESPONSE_STREAM if request.path == "/v1/responses" else STREAM))
    return web.Response(body=COMPLETION, content_type="application/json")


async def never_end(node: FakeNode, request: web.Request) -> web.StreamResponse:
    response = await begin(request, ROLE, chunk("a"))
    await node.go_on.wait()
    return response


async def never_begin(node: FakeNode, request: web.Request) -> web.StreamResponse:
    await node.go_on.wait()
    return web.Response()


async def fail_within_a_stream(node: FakeNode, request: web.Request) -> web.StreamResponse:
    failure = b'data: {"error":{"message":"the engine died","type":"api_error","code":null,"param":null}}\n\n'
    return await begin(request, ROLE, chunk("a"), failure, DONE)


async def never_go_on(node: FakeNode, request: web.Request) -> web.StreamResponse:
    response = await begin(request)
    await node.go_on.wait()
    return response


async def die_within_an_event(node: FakeNode, request: web.Request) -> web.StreamResponse:
    response = await begin(request, ROLE, chunk("a") + b'data: {"choi')
    assert request.transport is not None
    request.transport.close()
    return response


async def die_within_json(node: FakeNode, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id":')
    assert request.transport is not None
    request.transport.close()
    return response


async def die_late_within_json(node: FakeNode, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "10000000"})
    await response.prepare(request)
    for _ in range(20):
        await response.write(bytes(100_000))
    assert request.transport is not None
    request.transport.close()
    return response


async def die_before_the_first_byte(node: FakeNode, request: web.Request) -> web.StreamResponse:
    response = await begin(request)
    assert request.transport is not None
    request.transport.close()
    return response


async def refuse(node: FakeNode, request: web.Request) -> web.StreamResponse:
    body = {"error": {"message": "queue full", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}
    return web.json_response(body, status=503, headers={"Retry-After": "7"})
