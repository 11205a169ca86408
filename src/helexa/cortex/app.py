"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError
from helexa.cortex import gateway
from helexa.cortex.config import CortexConfig
from helexa.cortex.cors import Cors
from helexa.cortex.metrics import Metrics
from helexa.cortex.refusal import refuse_anything, refuse_api_error, refuse_http_error
from helexa.cortex.routes.generation import Generation
from helexa.cortex.routes.health import get_health
from helexa.cortex.routes.models import get_model, list_models
from helexa.cortex.routes.nodes import list_nodes


class HotPaths:
    """Answers POSTs to the paths that nearly all requests go to, and leaves the rest to an application.

    A router and its middleware cost a request more than all that is looked at of it here.
    """

    def __init__(self, app: Starlette, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
        else:
            scope["app"] = self._app
            await endpoint(scope, receive, send)


def create_app(config: CortexConfig, catalogue: Catalogue, metrics: Metrics | None = None) -> ASGIApp:
    """The API of one gateway. It polls its nodes from startup to shutdown; `metrics` is where it counts."""
    counted = metrics or Metrics()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with gateway.running(config, catalogue, counted) as app.state.gateway:
            yield

    generation = Generation()
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", generation, methods=["POST"]),
            Route("/v1/completions", generation, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{model:path}", get_model),
            Route("/api/nodes", list_nodes),
            Route("/health", get_health),
            Route("/", get_health),
        ],
        exception_handlers={
            ApiError: refuse_api_error,
            HTTPException: refuse_http_error,
            Exception: refuse_anything,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    hot = HotPaths(app, {"/v1/chat/completions": generation, "/v1/completions": generation})
    return Cors(hot, config.gateway.cors_origins) if config.gateway.cors_origins else hot
