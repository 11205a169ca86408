"""A node on a real socket, with fake engines, in the test process."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette
from yarl import URL

from helexa.http.listener import Listener, bind
from helexa.neuron.app import NodeConnection, create_app
from helexa.neuron.config import read_config
from helexa.neuron.engine_client.process_and_standby import Child, WarmStandby
from neuron.fake_models import ENGINE


class Node:
    """A running node and an HTTP client for it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, app: Starlette | None = None) -> None:
        self.url = url
        self.app = app
        self.session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(URL(self.url + path, encoded=True)) as response:
            return response.status, await response.json()

    async def read(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | headers
        async with self.session.post(self.url + path, data=BytesIO(data), headers=headers) as response:
            return response.status, await response.json()

    async def load(self, path: Path, model_id: str = "org/tiny") -> tuple[int, Any]:
        return await self.post("/models/load", {"model_id": model_id, "source": f"file:{path}"})


@asynccontextmanager
async def running(
    environ: dict[str, str], engine: Sequence[str] | None = ENGINE, *, port: int = 0
) -> AsyncIterator[Node]:
    """Run a node that listens on `port`, or on any free port if 0, regardless of the configured port.

    Args:
        environ: `NEURON_*` variables.
        engine: command of the engine; None for the real engine.
        port: port to listen on.
    """
    app = create_app(read_config(None, environ), standby=WarmStandby(partial(Child.spawn, engine)))
    server = Listener(app, connection=NodeConnection)
    listener = bind(("127.0.0.1", port))
    serving = asyncio.create_task(server.serve(listener))
    try:
        async with aiohttp.ClientSession() as session:
            yield Node(f"http://127.0.0.1:{listener.getsockname()[1]}", session, app)
    finally:
        server.should_exit = True
        await serving
