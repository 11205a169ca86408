"""What stands between an agent and the gateway: it passes requests on and remembers them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

_OF_THE_CONNECTION = frozenset({"host", "content-length", "transfer-encoding", "connection", "date"})


@dataclass
class Heard:
    """One request, the status of its answer, and the answer if that was a refusal."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    refusal: str = ""


@dataclass
class Wiretap:
    """A reverse proxy in front of `upstream`.

    It is also what an agent is given as its proxy to the world, of which it lets nothing through.

    Attributes:
        heard: requests that were passed on.
        strays: hosts, and their ports, that somebody wanted to reach through it.
    """

    upstream: str
    url: str = ""
    heard: list[Heard] = field(default_factory=list)
    strays: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Wiretap"]:
        """Take requests, at `url`."""
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            self._session = session
            runner = web.ServerRunner(web.Server(self._take), shutdown_timeout=0.1)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()

    async def _take(self, request: web.BaseRequest) -> web.StreamResponse:
        target = request.raw_path
        if request.method == "CONNECT" or not target.startswith("/"):
            self.strays.add(target.removeprefix("http://").partition("/")[0])
            return web.Response(status=403)
        data = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        heard = Heard(request.method, target, headers, json.loads(data) if data else None)
        self.heard.append(heard)
        kept = {name: value for name, value in headers.items() if name not in _OF_THE_CONNECTION}
        url = self.upstream + target
        async with self._session.request(request.method, url, data=data or None, headers=kept) as answer:
            heard.status = answer.status
            response = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in _OF_THE_CONNECTION:
                    response.headers.add(name, value)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                if answer.status >= 400:
                    heard.refusal += piece.decode()
                await response.write(piece)
            return response
