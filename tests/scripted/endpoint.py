"""An HTTP model endpoint that answers requests from a script, in any of the three API formats."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

from scripted.received_request import ReceivedRequest
from scripted.script_steps import Reject, Say
from scripted.wire_formats import WIRES

Step = Say | Reject | Callable[[ReceivedRequest], Say | Reject]

LISTING = {"object": "list", "data": [{"id": "scripted", "object": "model", "context_length": 32768}]}


class ScriptedEndpoint:
    """Answers each request with the next step of the script. A function in the script answers all further requests.

    As a context manager, the endpoint listens at `url`.

    Attributes:
        models: the list of models, or the error response of the models route.
        routes: the paths with a handler; other paths answer 404.
        requests: all received requests, oldest first.
        listing: event that the models route waits for.
        holding: event that is set when a stream pauses.
        released: event that continues paused streams.
        hung_up: event that is set when a client disconnects during a stream.
    """

    def __init__(self, *script: Step, models: Any = LISTING) -> None:
        self.script = list(script)
        self.models = models
        self.routes = set(WIRES)
        self.requests: list[ReceivedRequest] = []
        self.listing = asyncio.Event()
        self.listing.set()
        self.holding = asyncio.Event()
        self.released = asyncio.Event()
        self.hung_up = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._list)
        for path in WIRES:
            app.router.add_post(path, self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        await self.listing.wait()
        return _refused(self.models) if isinstance(self.models, Reject) else web.json_response(self.models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.path not in self.routes:
            return _refused(Reject(404, "404 page not found"))
        if not body:
            return _refused(Reject(400, {"error": {"message": "model is required"}}))
        self.requests.append(ReceivedRequest(request.path, body, request.headers))
        step = self._next_step()
        if isinstance(step, Reject):
            return _refused(step)
        events = WIRES[request.path](step, len(self.requests))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for count, event in enumerate(events):
                if count == step.cut_after:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                if count == step.hold_after:
                    self.holding.set()
                    await self.released.wait()
                name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
                data = event if isinstance(event, str) else json.dumps(event)
                await response.write(f"{name}data: {data}\n\n".encode())
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up.set()
            raise
        return response

    def _next_step(self) -> Say | Reject:
        step = self.script[0] if self.script else Reject(500, {"error": {"message": "the script is over"}})
        if not isinstance(step, Say | Reject):
            return step(self.requests[-1])
        del self.script[:1]
        return step


def _refused(step: Reject) -> web.Response:
    if isinstance(step.body, str):
        return web.Response(status=step.status, text=step.body, headers=step.headers)
    return web.json_response(step.body, status=step.status, headers=step.headers)
