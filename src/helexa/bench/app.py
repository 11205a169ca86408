"""The web server of the pages and the API."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helexa.bench import api
from helexa.bench.api_queries import QueryExecutor
from helexa.bench.pages.page_routes_and_html_export import ASSETS, error_page
from helexa.bench.pages.page_routes_and_html_export import routes as page_routes
from helexa.core.address import Address
from helexa.core.errors import ApiError
from helexa.http.listener import Listener, bind, stop_on_signals
from helexa.web import FOREVER
from helexa.web import SECURITY as WEB_SECURITY

SECURITY = WEB_SECURITY | {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY.items()]


def create_app(database: Path, root_path: str = "", console_url: str | None = None) -> Starlette:
    """Return a web application that shows the results in `database`.

    Args:
        database: path of the database. As long as the file does not exist, pages and queries get status 503.
        root_path: path prefix set by a reverse proxy, for example `/bench`. All links begin with this prefix.
        console_url: URL of a gateway's console, which the pages link to, or None.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.query_executor = QueryExecutor(database)
        await app.state.query_executor.warm_up()
        yield
        await app.state.query_executor.close()

    app = Starlette(
        routes=[
            *api.routes(),
            *page_routes(),
            Route("/static/{name:path}", _asset),
        ],
        exception_handlers={ApiError: _error_response, HTTPException: _error_response, Exception: _error_response},
        middleware=[Middleware(_SecurityHeaders)],
        lifespan=lifespan,
    )
    app.state.root_path = root_path.rstrip("/")
    app.state.console_url = console_url
    return app


async def _asset(request: Request) -> Response:
    """Respond with a static file.

    If the URL has a query, the query contains a hash of the file, so browsers may cache the file forever.
    """
    response = ASSETS.response(request.path_params["name"], FOREVER if request.url.query else "no-cache")
    if response is None:
        raise ApiError(404, None, "Not Found")
    return response


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, None, error.detail)
    in_api = request.url.path.startswith(("/api", "/openapi"))
    return await (api.api_error_response if in_api else error_page)(request, error)


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


log = logging.getLogger(__name__)


async def serve(database: Path, listen: Address, root_path: str = "", console_url: str | None = None) -> None:
    """Run the web server of the pages and the API until SIGINT or SIGTERM.

    Args:
        root_path: path prefix set by a reverse proxy.
        console_url: URL of a gateway's console, which the pages link to, or None.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    with bind(listen) as bound:
        listener = Listener(create_app(database, root_path, console_url))
        stop_on_signals(listener)
        log.info("listening url=http://%s", Address(*bound.getsockname()[:2]))
        await listener.serve(bound)
