"""A real HTTP server that serves image files, and records the requests that it receives."""

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""An image of one pixel."""

PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


@dataclass
class ImageServer:
    """The server's URLs, and the requests that it received."""

    port: int = 0
    requests: list[web.Request] = field(default_factory=list)
    respond: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/a.png"

    @property
    def hosts(self) -> list[str]:
        """Patterns that allow all hosts at this server's port."""
        return [f"*:{self.port}"]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        return web.Response(body=PNG) if self.respond is None else await self.respond(request)


@asynccontextmanager
async def image_server() -> AsyncIterator[ImageServer]:
    server = ImageServer()
    app = web.Application()
    app.router.add_get("/{path:.*}", server._handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
