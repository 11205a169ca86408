"""The gateway as an ASGI application, and the listeners that serve it."""

import asyncio
import logging
import socket
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from helexa.core.address import Address
from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError, ConfigError
from helexa.cortex import gateway
from helexa.cortex.access.proxies_exposure_and_cors import with_cors
from helexa.cortex.config import CortexConfig
from helexa.cortex.console.events import get_events
from helexa.cortex.console.oidc import check_extra, oidc_routes
from helexa.cortex.console.sign_in_sessions_and_page import (
    Console,
    get_root,
    get_session,
    page_routes,
    sign_in,
    sign_out,
)
from helexa.cortex.forwarding.token_bounds import CHAT, COMPACT, COMPLETIONS, EMBEDDINGS, IMAGES, RESPONSES
from helexa.cortex.gateway import METRICS_CONNECTIONS, Gateway
from helexa.cortex.ledger.storage.database import DatabaseError
from helexa.cortex.metrics import Metrics, create_metrics_app
from helexa.cortex.routes.access_and_errors import (
    OriginGuard,
    admin,
    handle_api_error,
    handle_database_error,
    handle_http_error,
    handle_unexpected_error,
    method_route,
    public,
    user,
    viewer,
)
from helexa.cortex.routes.generation import Generation, Messages, Responses, input_items, stored_response
from helexa.cortex.routes.health_usage_costs_and_activity import (
    get_document,
    get_health,
    get_history,
    get_readiness,
    get_usage,
    get_version,
    list_activity,
)
from helexa.cortex.routes.keys_and_nodes import (
    cordon_node,
    create_invitation,
    drain_node,
    join_node,
    key_routes,
    list_nodes,
    remove_node,
    uncordon_node,
)
from helexa.cortex.routes.models import (
    cancel_pull,
    clear_prefix_cache,
    get_explanation,
    get_model,
    list_local_models,
    list_models,
    list_pulls,
    load_model,
    pull_model,
    unload_model,
)
from helexa.cortex.routes.ollama_and_keep_alive import OLLAMA_ENDPOINTS, OllamaAddress, ollama_routes
from helexa.cortex.routes.tokens import ask_tokenizer, count_message_tokens, get_tokenizer_info
from helexa.cortex.shutdown import Shutdown
from helexa.http.listener import AddressInUseError, Listener, bind
from helexa.http.process import collect_seldom, notify, on_reload_signal, on_stop_signals, raise_descriptor_limit

_HOT: dict[str, ASGIApp] = {
    CHAT: Generation(),
    COMPLETIONS: Generation(),
    RESPONSES: Responses(),
    COMPACT: Generation(),
    EMBEDDINGS: Generation(),
    IMAGES: Generation(),
    "/v1/messages": Messages(),
}

_ENDPOINTS = _HOT | OLLAMA_ENDPOINTS
_API_PATHS = frozenset({*_ENDPOINTS, "/v1/models", "/v1/messages/count_tokens", "/v1/responses/input_tokens"})

# Paths without parameters come first, because a 405 response lists only the methods of the first route whose path
# matches.
ROUTES = [
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
    Route("/api/invitations", admin(create_invitation), methods=["POST"]),
    Route("/api/join", public(join_node), methods=["POST"]),
    Route("/api/nodes/{name:path}/cordon", admin(cordon_node), methods=["POST"]),
    Route("/api/nodes/{name:path}/uncordon", admin(uncordon_node), methods=["POST"]),
    Route("/api/nodes/{name:path}/drain", admin(drain_node), methods=["POST"]),
    Route("/api/nodes/{name:path}", admin(remove_node), methods=["DELETE"]),
    Route("/api/models/load", admin(load_model), methods=["POST"]),
    Route("/api/models/unload", admin(unload_model), methods=["POST"]),
    Route("/api/models/local", viewer(list_local_models)),
    Route("/api/models/pull", admin(pull_model), methods=["POST"]),
    Route("/api/models/pull/cancel", admin(cancel_pull), methods=["POST"]),
    Route("/api/models/pulls", viewer(list_pulls)),
    Route("/api/models/{model:path}/prefix-cache", admin(clear_prefix_cache), methods=["DELETE"]),
    Route("/api/activity", user(list_activity)),
    Route("/api/usage", user(get_usage)),
    Route("/api/history", viewer(get_history)),
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

log = logging.getLogger(__name__)


class HotPaths:
    """Calls the endpoints of frequent POST routes directly, other routes via `app`.

    If a request path is an API path with a doubled or missing `/v1`, or with a slash at the end, the path is corrected
    first.
    """

    def __init__(self, app: Starlette, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint of a frequent route, or else Starlette's application."""
        if scope["type"] == "http" and scope["path"] not in _API_PATHS:
            path = _canonical_path(scope["path"], _API_PATHS)
            if path is not None:
                scope["path"], scope["raw_path"] = path, path.encode()
        # For a frequent route, Starlette's router and middleware would take longer than all other work that the gateway
        # does before it forwards a request.
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
        else:
            scope["app"] = self._app
            await endpoint(scope, receive, send)


def _canonical_path(path: str, known: Collection[str]) -> str | None:
    """Return the path in `known` that a client with a wrong base URL means.

    Return None if `known` contains no such path.
    """
    # Some clients append `/v1/messages` to their base URL, others `/chat/completions`. If the base URL wrongly ends in
    # `/v1` or wrongly lacks it, `/v1` is doubled or missing in the path. The path may also end in a slash.
    # Other doubled slashes are not corrected, because a proxy in front of the gateway may restrict paths: a path that
    # the proxy does not recognize must not reach a restricted endpoint.
    path = path.removesuffix("/")
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    for candidate in (path, "/v1" + path):
        if candidate in known:
            return candidate
    return None


def create_app(gateway: Gateway) -> ASGIApp:
    """Return the ASGI application of a running gateway.

    Raises:
        HelexaError: the configuration needs an extra (optional Python dependencies) that is not installed.
    """
    console = Console(gateway)
    check_extra(console.settings.oidc)
    app = Starlette(
        routes=[*ROUTES, *ollama_routes, *page_routes, *oidc_routes(console)],
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
    hot_paths = HotPaths(app, _ENDPOINTS)
    section = gateway.config.gateway  # a reload changes neither the listen address nor the CORS origins
    cors_app = with_cors(hot_paths, section.cors_origins) if section.cors_origins else hot_paths
    return OriginGuard(cors_app, section, gateway.authenticator)


async def serve(config: CortexConfig, catalog: Catalog, path: Path | None = None) -> None:
    """Run the gateway's API and metrics listeners until SIGINT or SIGTERM.

    At SIGHUP, read the configuration again. After SIGINT or SIGTERM, reject new requests, wait `drain_secs` seconds for
    running requests, then end them. A second signal ends them at once.

    Args:
        path: path of cortex.toml, which is reloaded when it changes. None if there is no file.

    Raises:
        ConfigError: an address cannot be bound.
        HelexaError, or a subclass: the ledger cannot be opened.
    """
    descriptors = raise_descriptor_limit()
    metrics = Metrics()
    with ExitStack() as sockets:
        api = sockets.enter_context(_bind(config.gateway.listen, "gateway.listen"))
        scrape = sockets.enter_context(_bind(config.gateway.metrics_listen, "gateway.metrics_listen"))
        ollama = None
        if config.ollama.listen is not None:
            bound = _bind(config.ollama.listen, "ollama.listen", "Ollama or the other process there")
            ollama = sockets.enter_context(bound)
        async with gateway.running(config, catalog, metrics, path) as running_gateway:
            limits = running_gateway.connection_limits()
            app = create_app(running_gateway)
            listeners = [
                (Listener(app, limits=limits, bodies=running_gateway.bodies), api),
                (Listener(create_metrics_app(metrics), limits=METRICS_CONNECTIONS), scrape),
            ]
            if ollama is not None:
                listener = Listener(OllamaAddress(app), limits=limits, bodies=running_gateway.bodies)
                listeners.append((listener, ollama))
            shutdown = Shutdown(
                running_gateway.drain,
                lambda: running_gateway.config.gateway.drain_secs,
                [listener for listener, _ in listeners],
            )
            on_stop_signals(shutdown.signal)
            on_reload_signal(running_gateway.reload, shutdown.signal)
            collect_seldom()
            if not running_gateway.fleet.view().nodes:
                log.warning(
                    "no nodes are configured; add [[neurons]] to cortex.toml, "
                    "or let nodes join with `cortex nodes invite`"
                )
            addresses = [Address(*sock.getsockname()[:2]) for sock in (api, scrape)]
            log.info("listening url=http://%s metrics_url=http://%s/metrics", *addresses)
            if ollama is not None:
                log.info("listening for Ollama's clients url=http://%s", Address(*ollama.getsockname()[:2]))
            log.info(
                "limits set connections=%d per_address=%d open_files=%d", limits.total, limits.per_address, descriptors
            )
            notify("READY=1")  # all sockets already accept connections
            await asyncio.gather(*(listener.serve(sock) for listener, sock in listeners))


def _bind(address: Address, setting: str, program: str = "the process that uses the address") -> socket.socket:
    try:
        return bind(address)
    except AddressInUseError as error:
        raise ConfigError(f"{error}; end {program}, or change {setting}") from None
    except ConfigError as error:
        raise ConfigError(f"{error}; change {setting}") from None
