"""The gateway as an ASGI application."""

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from helexa.core.errors import ApiError
from helexa.cortex.access.cors import with_cors
from helexa.cortex.access.origin import OriginGuard
from helexa.cortex.console.console import Console
from helexa.cortex.console.event_routes import get_events
from helexa.cortex.console.oidc import check_extra, oidc_routes
from helexa.cortex.console.pages import get_root, page_routes
from helexa.cortex.console.session_routes import get_session, sign_in, sign_out
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.storage.database import DatabaseError
from helexa.cortex.requests.error_response import (
    handle_api_error,
    handle_database_error,
    handle_http_error,
    handle_unexpected_error,
)
from helexa.cortex.routes.access import admin, method_route, public, user, viewer
from helexa.cortex.routes.activity import list_activity
from helexa.cortex.routes.count_tokens import count_message_tokens
from helexa.cortex.routes.explain import get_explanation
from helexa.cortex.routes.generation import Generation, Messages, Responses
from helexa.cortex.routes.health import get_health, get_readiness, get_version
from helexa.cortex.routes.keys import key_routes
from helexa.cortex.routes.model_loads import load_model, unload_model
from helexa.cortex.routes.models import get_model, list_models
from helexa.cortex.routes.nodes import cordon_node, drain_node, list_nodes, uncordon_node
from helexa.cortex.routes.openapi import get_document
from helexa.cortex.routes.responses import input_items, stored_response
from helexa.cortex.routes.tokens import ask_tokenizer, get_tokenizer_info
from helexa.cortex.routes.usage import get_usage
from helexa.cortex.usage.token_limit import CHAT, COMPACT, COMPLETIONS, EMBEDDINGS, IMAGES, RESPONSES

_HOT: dict[str, ASGIApp] = {
    CHAT: Generation(),
    COMPLETIONS: Generation(),
    RESPONSES: Responses(),
    COMPACT: Generation(),
    EMBEDDINGS: Generation(),
    IMAGES: Generation(),
    "/v1/messages": Messages(),
}

ROUTES = [  # paths without parameters come first, because the first route of a path lists its methods
    *(Route(hot, endpoint, methods=["POST"]) for hot, endpoint in _HOT.items()),
    *(
        Route(path, ask_tokenizer, methods=["POST"])
        for path in ("/tokenize", "/detokenize", "/v1/responses/input_tokens")
    ),
    Route("/tokenizer_info", user(get_tokenizer_info)),
    Route("/v1/models", user(list_models)),
    Route("/v1/models/{model:path}", user(get_model)),
    Route("/v1/responses/{response_id}", user(stored_response), methods=["GET", "DELETE"]),
    Route("/v1/responses/{response_id}/input_items", user(input_items), methods=["GET"]),
    Route("/v1/messages/count_tokens", count_message_tokens, methods=["POST"]),
    Route("/api/nodes", viewer(list_nodes)),
    Route("/api/nodes/{name:path}/cordon", admin(cordon_node), methods=["POST"]),
    Route("/api/nodes/{name:path}/uncordon", admin(uncordon_node), methods=["POST"]),
    Route("/api/nodes/{name:path}/drain", admin(drain_node), methods=["POST"]),
    Route("/api/models/load", admin(load_model), methods=["POST"]),
    Route("/api/models/unload", admin(unload_model), methods=["POST"]),
    Route("/api/activity", user(list_activity)),
    Route("/api/usage", user(get_usage)),
    Route("/api/events", user(get_events)),
    method_route("/api/session", GET=public(get_session), POST=public(sign_in), DELETE=public(sign_out)),
    Route("/api/explain", viewer(get_explanation)),
    *key_routes,
    Route("/openapi.json", public(get_document)),
    Route("/version", user(get_version)),
    Route("/health", public(get_health)),
    Route("/health/ready", public(get_readiness)),
    Route("/", public(get_root)),
]


class HotPaths:
    """ASGI application that calls the endpoints of frequent POST routes directly, and passes other requests to `app`.

    For a frequent route, Starlette's router and middleware would take longer than all other work that the gateway does
    before it forwards a request.
    """

    def __init__(self, app: Starlette, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint of a frequent route, or else Starlette's application."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
        else:
            scope["app"] = self._app
            await endpoint(scope, receive, send)


def create_app(gateway: Gateway) -> ASGIApp:
    """Return the ASGI application of a running gateway.

    Raises:
        HelexaError: the configuration needs an extra that is not installed.
    """
    console = Console(gateway)
    check_extra(console.settings.oidc)
    app = Starlette(
        routes=[*ROUTES, *page_routes, *oidc_routes(console)],
        exception_handlers={
            ApiError: handle_api_error,
            HTTPException: handle_http_error,
            DatabaseError: handle_database_error,
            Exception: handle_unexpected_error,
        },
    )
    app.state.gateway = gateway
    app.state.console = console
    app.router.redirect_slashes = False
    hot_paths = HotPaths(app, _HOT)
    section = gateway.config.gateway  # address and origins do not change on a reload
    cors_app = with_cors(hot_paths, section.cors_origins) if section.cors_origins else hot_paths
    return OriginGuard(cors_app, section, gateway.authenticator)
