"""CORS over a real socket: preflights are answered without calling the application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cortex.running_gateway import listening
from helexa.cortex.access.proxies_exposure_and_cors import with_cors
from helexa.http.listener import Listener

PAGE, FOREIGN = "https://chat.example", "https://evil.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}


class RejectingApplication:
    """An application that rejects each request with 401, as authentication would."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.methods.append(Request(scope).method)
        await Response("no", 401, {"vary": "Accept"})(scope, receive, send)


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with listening(Listener(app)) as url, aiohttp.ClientSession() as client:
        yield client, url


@pytest.mark.parametrize("origins", [[PAGE], [f"{PAGE}/", "https://other.example"], ["*"]])
async def test_configured_origin_gets_cors_headers(origins: list[str]) -> None:
    application = RejectingApplication()
    allowed = "*" if origins == ["*"] else PAGE
    async with client_of(with_cors(application, origins)) as (client, url):
        async with client.options(url, headers={"Origin": PAGE, **PREFLIGHT}) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == allowed
            assert "POST" in response.headers["access-control-allow-methods"]
            assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
            assert "access-control-allow-credentials" not in response.headers
        assert application.methods == []
        async with client.post(url, headers={"Origin": PAGE}) as response:
            assert response.status == 401
            assert response.headers.getall("access-control-allow-origin") == [allowed]
            assert response.headers.getall("vary") == ["Accept, Origin"]
            assert "x-request-id" in response.headers["access-control-expose-headers"]


async def test_origin_that_is_not_configured_gets_no_cors_headers() -> None:
    application = RejectingApplication()
    async with client_of(with_cors(application, [PAGE])) as (client, url):
        async with client.options(url, headers={"Origin": FOREIGN, **PREFLIGHT}) as response:
            assert response.status == 400
            assert "access-control-allow-origin" not in response.headers
        assert application.methods == []
        async with client.post(url, headers={"Origin": FOREIGN}) as response:
            assert "access-control-allow-origin" not in response.headers
        async with client.options(
            url, headers={"Origin": PAGE}
        ) as response:  # not a preflight: it has no Access-Control-Request-Method
            assert response.status == 401
        async with client.get(url) as response:
            assert "access-control-allow-origin" not in response.headers
    assert application.methods == ["POST", "OPTIONS", "GET"]
