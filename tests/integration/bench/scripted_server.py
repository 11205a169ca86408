"""A server that sends scripted events at scripted times."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.virtual_time import VirtualClock
from helexa.bench.client import Client, open_session
from helexa.bench.host_build_and_model import TargetKind
from helexa.bench.wire_formats import api_format_of


@dataclass
class Step:
    """Events that the server writes at once, `wait` seconds after the previous step.

    Dictionaries are sent as JSON, strings unchanged.
    """

    wait: float
    events: Sequence[dict[str, Any] | str]


@dataclass
class Script:
    """One response.

    Attributes:
        status, body: status and JSON body of a response other than 200; a response with 200 streams `steps`.
        disconnects: whether the server aborts the connection after the last step.
    """

    steps: Sequence[Step] = ()
    status: int = 200
    body: dict[str, Any] = field(default_factory=dict)
    disconnects: bool = False


class ScriptedServer:
    """Answers requests with the given scripts in order, or with `scripts(number of the request, arrival time)`.

    Attributes:
        arrived: arrival time of each request.
        disconnects: times at which a client closed its connection during a response.
    """

    def __init__(self, scripts: Sequence[Script] | Callable[[int, float], Script]) -> None:
        self._scripts = scripts
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrived: list[float] = []
        self.disconnects: list[float] = []

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/chat/completions", self.respond), web.post("/v1/messages", self.respond)]

    async def respond(self, request: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        number = len(self.bodies)
        self.arrived.append(loop.time())
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        scripts = self._scripts
        script = scripts(number, loop.time()) if callable(scripts) else scripts[number]
        if script.status != 200:
            return web.json_response(script.body, status=script.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for step in script.steps:
                await asyncio.sleep(step.wait)
                await response.write(b"".join(map(_frame, step.events)))
        except (ConnectionError, asyncio.CancelledError):
            self.disconnects.append(loop.time())
            raise
        if script.disconnects and request.transport is not None:
            request.transport.abort()
        return response


def _frame(event: dict[str, Any] | str) -> bytes:
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


@asynccontextmanager
async def client_of(server: ScriptedServer, kind: TargetKind = "openai", **options: Any) -> AsyncIterator[Client]:
    """Start the server and yield a client that is connected through a Unix socket."""
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(server.routes())
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True, access_log=None)
    await runner.setup()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        await web.UnixSite(runner, str(path)).start()
        async with open_session(aiohttp.UnixConnector(str(path), limit=0)) as session:
            yield Client(session, "http://server", api_format_of(kind), VirtualClock(), **options)
        await runner.cleanup()


def delta_chunk(text: str = "", **delta: Any) -> dict[str, Any]:
    """Return a chat completion chunk with a delta."""
    return {"choices": [{"index": 0, "delta": ({"content": text} if text else {}) | delta}]}


def finish_chunk(reason: str = "stop") -> dict[str, Any]:
    """Return the chat completion chunk with the finish reason."""
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def usage_chunk(prompt: int, completion: int, **details: Any) -> dict[str, Any]:
    """Return the chat completion chunk with the usage."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion} | details}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
DONE = "[DONE]"


def streamed_script(ttft: float, tokens: int, gap: float, text: str = "b") -> Script:
    """Return a stream of `tokens` chunks, one token each: the first after `ttft` seconds, then one every `gap` s."""
    steps = [Step(ttft, [delta_chunk(text)]), *(Step(gap, [delta_chunk(text)]) for _ in range(tokens - 1))]
    return Script([*steps, Step(0, [finish_chunk(), usage_chunk(10, tokens), DONE])])
