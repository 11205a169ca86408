"""A scripted server that also answers as a neuron does: what it is, what it has loaded, and what it is told to do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from bench.scripted_server import Script, ScriptedServer, client_of
from helexa.bench.config import TargetSection
from helexa.bench.scenarios.scenario import Subject
from helexa.bench.targets.connect import Connection, connect

ENTRY = {"id": "m", "harness": "torch", "quant": "q6k", "devices": [1, 2], "capabilities": ["text"], "tool_call": True}
LOAD_SECS, UNLOAD_SECS = 4.0, 0.5


class ScriptedNode(ScriptedServer):
    """A node with one model.

    Attributes:
        entry: its model in `/models`.
        in_flight: requests that it counts.
        lingers: seconds for which it counts a request that is over.
        told: what it was told, and with which body.
        loads: whether a load succeeds.
    """

    def __init__(self, answers: Sequence[Script] | Callable[[int, float], Script], **entry: Any) -> None:
        super().__init__(answers)
        self.entry = ENTRY | entry
        self.in_flight = 0
        self.lingers = 0.0
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.loads = True

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/version", self._version),
            web.get("/models", self._models),
            web.get("/health", self._health),
            web.post("/models/unload", self._unload),
            web.post("/models/load", self._load),
        ]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        try:
            return await super().answer(request)
        finally:
            asyncio.get_running_loop().call_later(self.lingers, self._release)

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
        self.told.append(("unload", await request.json()))
        await asyncio.sleep(UNLOAD_SECS)
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        self.told.append(("load", await request.json()))
        await asyncio.sleep(LOAD_SECS)
        return web.json_response({}) if self.loads else web.json_response({"error": "no room"}, status=507)


@asynccontextmanager
async def connection_to(node: ScriptedServer) -> AsyncIterator[Connection]:
    """The node as a target."""
    async with client_of(node) as client:
        yield connect(TargetSection(name="node", endpoint=client.endpoint), client.session)


@asynccontextmanager
async def subject_of(node: ScriptedServer, salt: str = "salt") -> AsyncIterator[Subject]:
    """The node's model, as a scenario is given it."""
    async with client_of(node) as client:
        server = connect(TargetSection(name="node", endpoint=client.endpoint), client.session).server
        (model,) = await server.models()
        yield Subject(client, model, client.clock, salt, server.control)
