"""A scripted server with the neuron API: version, models, health, load and unload."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from bench.scripted_server import Script, ScriptedServer, client_of
from helexa.bench.config import TargetSection
from helexa.bench.scenarios.scenario import Subject
from helexa.bench.servers import Connection, connect

ENTRY = {"id": "m", "harness": "torch", "quant": "q6k", "devices": [1, 2], "capabilities": ["text"], "tool_call": True}
LOAD_SECS, UNLOAD_SECS = 4.0, 0.5


class ScriptedNode(ScriptedServer):
    """A node with one model.

    Attributes:
        entry: the model's entry in `/models`.
        in_flight: the number of running requests that `/health` reports.
        release_delay: seconds for which `in_flight` still counts a finished request.
        commands: received load and unload requests: the command's name and its body.
        load_succeeds: whether load requests succeed.
    """

    def __init__(self, scripts: Sequence[Script] | Callable[[int, float], Script], **entry: Any) -> None:
        super().__init__(scripts)
        self.entry = ENTRY | entry
        self.in_flight = 0
        self.release_delay = 0.0
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.load_succeeds = True

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/version", self._version),
            web.get("/models", self._models),
            web.get("/health", self._health),
            web.post("/models/unload", self._unload),
            web.post("/models/load", self._load),
        ]

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        try:
            return await super().respond(request)
        finally:
            asyncio.get_running_loop().call_later(self.release_delay, self._release)

    def _release(self) -> None:
        self.in_flight -= 1

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"git_sha": "abc1234", "package_version": "1.0"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response([self.entry])

    async def _health(self, request: web.Request) -> web.Response:
        device = {"index": 1, "vram_used_mb": 1000, "vram_free_mb": 500}
        return web.json_response({"devices": [device], "models": [{"id": "m", "in_flight": self.in_flight}]})

    async def _unload(self, request: web.Request) -> web.Response:
        self.commands.append(("unload", await request.json()))
        await asyncio.sleep(UNLOAD_SECS)
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        self.commands.append(("load", await request.json()))
        await asyncio.sleep(LOAD_SECS)
        return web.json_response({}) if self.load_succeeds else web.json_response({"error": "no room"}, status=507)


@asynccontextmanager
async def connection_to(node: ScriptedServer) -> AsyncIterator[Connection]:
    """Yield a connection to the node as a target."""
    async with client_of(node) as client:
        yield connect(TargetSection(name="node", endpoint=client.endpoint), client.session)


@asynccontextmanager
async def subject_of(node: ScriptedServer, salt: str = "salt") -> AsyncIterator[Subject]:
    """Yield the node's model as the subject of a scenario."""
    async with client_of(node) as client:
        server = connect(TargetSection(name="node", endpoint=client.endpoint), client.session).server
        (model,) = await server.models()
        yield Subject(client, model, client.clock, salt, server)
