"""A proxy between an agent and the gateway that forwards requests and records them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

_CONNECTION_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "date"})


@dataclass
class ForwardedRequest:
    """One request, the status of its response, and the body of an error response."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    error_body: str = ""


@dataclass
class Wiretap:
    """A reverse proxy in front of `upstream`.

    Agents also use it as their HTTP proxy for other hosts; it rejects all such requests.

    Attributes:
        requests: the forwarded requests.
        rejected_hosts: hosts, with ports, of the rejected requests.
    """

    upstream: str
    url: str = ""
    requests: list[ForwardedRequest] = field(default_factory=list)
    rejected_hosts: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Wiretap"]:
        """Serve at `url` until the block ends."""
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            self._session = session
            runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target = request.raw_path
        if request.method == "CONNECT" or not target.startswith("/"):
            self.rejected_hosts.add(target.removeprefix("http://").partition("/")[0])
            return web.Response(status=403)
        data = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        forwarded = ForwardedRequest(request.method, target, headers, json.loads(data) if data else None)
        self.requests.append(forwarded)
        upstream_headers = {name: value for name, value in headers.items() if name not in _CONNECTION_HEADERS}
        url = self.upstream + target
        async with self._session.request(request.method, url, data=data or None, headers=upstream_headers) as upstream:
            forwarded.status = upstream.status
            response = web.StreamResponse(status=upstream.status)
            for name, value in upstream.headers.items():
                if name.lower() not in _CONNECTION_HEADERS:
                    response.headers.add(name, value)
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                if upstream.status >= 400:
                    forwarded.error_body += data.decode()
                await response.write(data)
            return response
