"""A server of the OpenAI routes on a real socket, with a scripted engine."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
from starlette.applications import Starlette
from starlette.routing import Route

from helexa.core.sse import EventParser
from helexa.http.listener import Listener
from helexa.neuron.config import ResponsesConfig
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.routes import chat, completions, health_and_model_list, responses
from helexa.neuron.routes.replies_disconnects_and_errors import HANDLERS
from helexa.neuron.routes.stored_responses import ResponseStore
from helexa.neuron.text.tokenizer import Tokenizer
from neuron.scripted_engine import CONTEXT, MODEL, TOKENIZER, Registry, Script, scripted_model

ROUTES = [*chat.routes, *completions.routes, *responses.routes, *health_and_model_list.routes]
TIMEOUT_SECONDS = 30.0  # seconds until a test gives up

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "once"}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


class Node:
    """A running server and HTTP clients for it."""

    def __init__(self, model: ServedModel, url: str, http: aiohttp.ClientSession) -> None:
        self.model = model
        self.engine: Any = model.engine
        self.url = url
        self.http = http
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def post(self, path: str, value: object) -> tuple[int, Any]:
        headers = {"content-type": "application/json"}
        async with self.http.post(f"{self.url}{path}", data=json.dumps(value), headers=headers) as response:
            return response.status, await response.json()

    async def error(self, path: str, value: object) -> tuple[int, str, str]:
        """Return the status, code and message of the error response to a request."""
        status, body = await self.post(path, value)
        assert body.keys() == {"error"}
        assert {"message", "type", "code", "param"} <= body["error"].keys()
        return status, body["error"]["code"], body["error"]["message"]

    async def events(self, path: str, value: dict[str, Any]) -> list[str]:
        """Return the data of all events of a stream."""
        parser, events = EventParser(), []
        async with self.http.post(f"{self.url}{path}", json={**value, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            async for chunk in response.content.iter_any():
                events += [event.data for event in parser.feed(chunk)]
        return events


@asynccontextmanager
async def serve(
    script: Script,
    template: str | None = None,
    *,
    tokenizer: Tokenizer = TOKENIZER,
    context: int = CONTEXT,
    stored_responses: ResponsesConfig | None = None,
    routes: Sequence[Route] = ROUTES,
) -> AsyncIterator[Node]:
    """Run a server with one model whose engine runs `script` for each request."""
    model = scripted_model(script, template=template, tokenizer=tokenizer, context=context)
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.registry = Registry(model)
    app.state.responses = ResponseStore(stored_responses or ResponsesConfig())
    # asyncio turns Nagle's algorithm off only for sockets with an explicit protocol.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = Listener(app)
    serving = asyncio.create_task(server.serve(listener))
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS), aiohttp.ClientSession() as http:
            node = Node(model, f"http://127.0.0.1:{listener.getsockname()[1]}", http)
            async with node.openai:
                yield node
    finally:
        server.should_exit = True
        await serving
        await model.grammars.aclose()
