"""The web application that serves the HTML pages and the API (ASGI)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helexa.bench.api import routes
from helexa.bench.api.query_executor import QueryExecutor
from helexa.bench.pages import site
from helexa.core.errors import ApiError

SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY.items()]


def create_app(database: Path, root_path: str = "") -> Starlette:
    """Return a web application that shows the results in `database`.

    Args:
        database: path of the database. As long as the file does not exist, requests get a 503.
        root_path: path prefix set by a reverse proxy, for example `/bench`. All links begin with this prefix.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.query_executor = QueryExecutor(database)
        await app.state.query_executor.warm_up()
        yield
        await app.state.query_executor.close()

    static = resources.files("helexa.bench.pages").joinpath("static")
    app = Starlette(
        routes=[
            *routes.routes(),
            *site.routes(),
            Mount("/static", StaticFiles(directory=str(static)), name="static"),
        ],
        exception_handlers={ApiError: _error_response, HTTPException: _error_response, Exception: _error_response},
        middleware=[Middleware(_SecurityHeaders)],
        lifespan=lifespan,
    )
    app.state.root_path = root_path.rstrip("/")
    return app


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, None, error.detail)
    in_api = request.url.path.startswith(("/api", "/openapi"))
    return await (routes.api_error_response if in_api else site.error_page)(request, error)


class _SecurityHeaders:
    """ASGI middleware that adds security headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, guarded if scope["type"] == "http" else send)
