"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError
from helexa.cortex import gateway
from helexa.cortex.config import CortexConfig
from helexa.cortex.metrics import Metrics
from helexa.cortex.refusal import refuse_anything, refuse_api_error, refuse_http_error
from helexa.cortex.routes.generation import Generation
from helexa.cortex.routes.health import get_health, list_nodes
from helexa.cortex.routes.models import get_model, list_models


def create_app(config: CortexConfig, catalogue: Catalogue, metrics: Metrics | None = None) -> Starlette:
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
    return app
