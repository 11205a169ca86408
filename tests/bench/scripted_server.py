"""A server that answers by a script: what it sends, and when, to the microsecond."""

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
from helexa.bench.client import Client, dialect_of, open_session
from helexa.bench.identity import TargetKind


@dataclass
class Step:
    """After `wait` seconds, events are written at once: dictionaries as JSON, text as it is."""

    wait: float
    events: Sequence[dict[str, Any] | str]


@dataclass
class Script:
    """One answer.

    Attributes:
        dies: the connection is cut after the last step.
        status, body: of an answer that is no stream.
    """

    steps: Sequence[Step] = ()
    status: int = 200
    body: dict[str, Any] = field(default_factory=dict)
    dies: bool = False


class ScriptedServer:
    """Gives its answers in turn, or what a function of the request's number and its moment of arrival makes."""

    def __init__(self, answers: Sequence[Script] | Callable[[int, float], Script]) -> None:
        self._answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrived: list[float] = []
        self.gone: list[float] = []

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/chat/completions", self.answer), web.post("/v1/messages", self.answer)]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        number = len(self.bodies)
        self.arrived.append(loop.time())
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        answers = self._answers
        script = answers(number, loop.time()) if callable(answers) else answers[number]
        if script.status != 200:
            return web.json_response(script.body, status=script.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for step in script.steps:
                await asyncio.sleep(step.wait)
                await response.write(b"".join(map(_frame, step.events)))
        except (ConnectionError, asyncio.CancelledError):
            self.gone.append(loop.time())
            raise
        if script.dies and request.transport is not None:
            request.transport.abort()
        return response


def _frame(event: dict[str, Any] | str) -> bytes:
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


@asynccontextmanager
async def client_of(server: ScriptedServer, kind: TargetKind = "openai", **options: Any) -> AsyncIterator[Client]:
    """A client of the server, over a Unix socket."""
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(server.routes())
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True, access_log=None)
    await runner.setup()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        await web.UnixSite(runner, str(path)).start()
        async with open_session(aiohttp.UnixConnector(str(path), limit=0)) as session:
            yield Client(session, "http://server", dialect_of(kind), VirtualClock(), **options)
        await runner.cleanup()


def said(text: str = "", **delta: Any) -> dict[str, Any]:
    """A chunk of chat completions."""
    return {"choices": [{"index": 0, "delta": ({"content": text} if text else {}) | delta}]}


def ended(reason: str = "stop") -> dict[str, Any]:
    """The chunk that ends an answer."""
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    """The chunk with the counts."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion} | more}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
DONE = "[DONE]"


def answer_in(ttft: float, tokens: int, gap: float, text: str = "b") -> Script:
    """An answer of so many tokens, one to a chunk."""
    steps = [Step(ttft, [said(text)]), *(Step(gap, [said(text)]) for _ in range(tokens - 1))]
    return Script([*steps, Step(0, [ended(), usage(10, tokens), DONE])])
