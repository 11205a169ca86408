"""The paths of Ollama's API."""

import hashlib
from collections.abc import Callable

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from helexa.core.catalog import PINNED_RESIDENCY
from helexa.core.errors import ApiError
from helexa.cortex.access.auth import authorize
from helexa.cortex.access.keys import Principal
from helexa.cortex.access.rate_limiter import RateLimitPermit
from helexa.cortex.fleet.fleet_view import FleetView, files_of
from helexa.cortex.forwarding.client_reply_and_error_events import Reply
from helexa.cortex.forwarding.request_body_limit_and_workers import read_small_body
from helexa.cortex.gateway import Gateway
from helexa.cortex.lifecycle.pulls import NodePull
from helexa.cortex.ollama.listed_models import ListedModel
from helexa.cortex.ollama.reply import VERSION, OllamaReply, to_ollama_error
from helexa.cortex.ollama.requests import ModelRequest
from helexa.cortex.ollama.to_openai import BLOBS, CHAT_API, EMBED_API, EMBEDDINGS_API, GENERATE_API, Translation
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.routes.access_and_errors import Endpoint, public, user
from helexa.cortex.routes.body_translation import read_ollama
from helexa.cortex.routes.generation import Generation
from helexa.cortex.routes.models import PullStream, entries_of, entry_of
from helexa.cortex.routing import unknown_model
from helexa.cortex.serve_request import find_model, serve, wait_for_model
from helexa.http.headers import Headers, require_json
from helexa.http.request_cycle_and_disconnects import ClientDisconnected, DisconnectGuard
from helexa.http.responses import JsonResponse

_BROWSER_HEADERS = frozenset({b"origin", b"referer", b"sec-fetch-site"})
_JSON = (b"content-type", b"application/json")
_RUNNING = "Ollama is running"
_SUCCESS = {"status": "success"}
_LINES = b'{"status":"pulling manifest"}\n{"status":"success"}\n'
_LINES_TYPE = "application/x-ndjson"
_NOT_IMPLEMENTED = {
    "/api/create": "the gateway creates no models; add a model to its catalog",
    "/api/copy": "the gateway copies no models; add an alias to its catalog",
    "/api/push": "the gateway uploads no models",
    "/v1/systemone": "the gateway has no models for System One",
    "/api/delete": "the gateway deletes no models; run `helexa rm MODEL` on the node",
}


class OllamaGeneration(Generation):
    """Endpoint of `/api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings`.

    Nodes receive a request of OpenAI's API, and their response is translated back. A request without messages, prompt
    or texts loads the model, or unloads it if `keep_alive` is 0.
    """

    def check(self, gateway: Gateway, headers: Headers) -> None:
        """Reject a request if Ollama's API is disabled, or if its headers are not allowed."""
        _require_enabled(gateway)
        _check_headers(headers)

    def response(self, send: Send, request_id: str) -> Reply:
        """Return the `Reply` that translates the node's response to Ollama's API."""
        return OllamaReply(send)

    async def answer(
        self,
        gateway: Gateway,
        headers: Headers,
        body: bytes,
        response: Reply,
        record: RequestRecord,
        permit: RateLimitPermit,
    ) -> None:
        """Translate the request body and serve the request, or load or unload the model."""
        assert isinstance(response, OllamaReply)
        translation, request = await read_ollama(gateway.body_workers, record.api, headers, body)
        keep_secs = translation.keep_alive
        has_effect = keep_secs is None or _may_unload(record.principal)
        response.answers(translation, record, () if has_effect else ("keep_alive",))
        if request is not None:
            await serve(gateway, request, response, record, permit)
        else:
            await _load_or_unload(gateway, translation, response, record)
        # As in Ollama, the idle time `keep_alive` begins after the answer. A `keep_alive` of 0 unloads the model now.
        if keep_secs is not None and has_effect:
            gateway.lifecycle.keep(record.model, keep_secs)


async def _load_or_unload(
    gateway: Gateway, translation: Translation, response: OllamaReply, record: RequestRecord
) -> None:
    record.name = translation.model
    view, model, model_known = await find_model(gateway, translation.model)
    if model_known:
        record.model = model
    authorize(record.principal, model, translation.model)
    if not model_known and any(node.healthy for node in view.nodes):
        raise unknown_model(view, translation.model)
    if translation.unloads:
        _check_unload(gateway, view, model, record.principal)
    else:
        # A load costs no tokens, but a key without budget must not occupy the memory of nodes.
        if record.principal is not None:
            await gateway.ledger.check_budget(record.principal)
        target = await wait_for_model(gateway, model, translation.stream, response, record)
        record.node = target.node
    record.status = 200
    await response.send_done("unload" if translation.unloads else "load")


def _may_unload(principal: Principal | None) -> bool:
    """Return whether a request may decide how long a model stays loaded."""
    # With keys, a gateway has several users, and each of them could unload the models of the others.
    return principal is None or principal.role == "admin"


def _check_unload(gateway: Gateway, view: FleetView, model: str, principal: Principal | None) -> None:
    if not _may_unload(principal):
        raise ApiError(403, "admin_only", "only an admin may unload a model; send an admin's API key")
    profile = gateway.catalog.profile(model)
    if profile is not None and (profile.residency_priority or 0) >= PINNED_RESIDENCY:
        raise ApiError(
            409,
            "model_pinned",
            f"model '{model}' is pinned in the catalog; an admin can unload it with `helexa unload`",
        )
    kinds = {node.kind for node in view.nodes if model in node.models}
    if kinds and "neuron" not in kinds:
        raise ApiError(
            409,
            "third_party_backend",
            f"a third-party backend serves model '{model}', so only that backend can unload the model",
        )


async def list_tags(request: Request) -> Response:
    """`GET /api/tags`: respond with all models and aliases that the key may use."""
    snapshot = _gateway(request).lifecycle.snapshot()
    return JsonResponse({"models": [ListedModel(snapshot, entry).tag() for entry in entries_of(request)]})


async def list_running(request: Request) -> Response:
    """`GET /api/ps`: respond with the loaded models."""
    snapshot = _gateway(request).lifecycle.snapshot()
    aliases = snapshot.catalog.aliases
    models = [ListedModel(snapshot, entry) for entry in entries_of(request) if entry["id"] not in aliases]
    return JsonResponse({"models": [model.running() for model in models if model.is_running]})


async def show_model(request: Request) -> Response:
    """`POST /api/show`: respond with the properties of one model."""
    entry = entry_of(request, (await _model_request(request)).model)
    return JsonResponse(ListedModel(_gateway(request).lifecycle.snapshot(), entry).show())


async def get_version(request: Request) -> Response:
    """Respond with the version of Ollama whose API the gateway serves."""
    return JsonResponse({"version": VERSION})


async def reject(request: Request) -> Response:
    """Reject an Ollama request for a function that the gateway lacks."""
    message = _NOT_IMPLEMENTED.get(request.url.path, "the gateway takes no model files; put them on a node")
    raise ApiError(501, "not_implemented", message)


class OllamaAddress:
    """Middleware of the listener at Ollama's address: answers `GET /` as Ollama does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `GET /` and `HEAD /`, or call the wrapped application."""
        is_root = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        await (PlainTextResponse(_RUNNING) if is_root else self._app)(scope, receive, send)


async def _model_request(request: Request) -> ModelRequest:
    _check_headers(request.headers.raw)
    return ModelRequest.parse(await read_small_body(request.receive, request.headers.raw))


def _check_headers(headers: Headers) -> None:
    """Reject a request whose content type is not JSON, if a web page may have sent it.

    Other clients may send any content type, because Ollama accepts any: the curl commands in Ollama's documentation
    send the content type of HTML forms.
    """
    is_browser = any(name in _BROWSER_HEADERS for name, _ in headers)
    require_json(headers if is_browser else [_JSON, *(header for header in headers if header[0] != b"content-type")])


def _require_enabled(gateway: Gateway) -> None:
    if not gateway.config.ollama.enabled:
        raise ApiError(
            404, "unknown_path", "Ollama's API is disabled; set `enabled = true` in the section [ollama] of cortex.toml"
        )


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


def _route(path: str, method: str, endpoint: Endpoint, access: Callable[[Endpoint], Endpoint] = user) -> Route:
    async def enabled(request: Request) -> Response:
        _require_enabled(_gateway(request))
        return await endpoint(request)

    return Route(path, access(enabled), methods=[method])


async def pull(request: Request) -> Response:
    """`POST /api/pull`: download a model, and respond with its progress or its end.

    If a node already has the model, nothing is downloaded, and the client needs no special right.
    """
    gateway, body = _gateway(request), await _model_request(request)
    principal: Principal | None = request.state.principal
    view, model, _ = await find_model(gateway, body.model)
    streams = body.stream is not False
    if view.has_model(model) or files_of(view, gateway.catalog, model) is not None:
        authorize(principal, model, body.model)
        return Response(_LINES, media_type=_LINES_TYPE) if streams else JsonResponse(_SUCCESS)
    _check_right(gateway, principal)
    started = await gateway.pulls.start(body.model.removesuffix(":latest"), None, gateway.catalog)
    if streams:
        return _PullLines(gateway.pulls, started)
    last = started
    try:
        with request.scope["extensions"][DisconnectGuard.NAME]:
            async for state in gateway.pulls.follow(started):
                last = state
    except ClientDisconnected:
        return Response(status_code=499)
    if last.pull.status != "done":
        raise _pull_failure(last)
    return JsonResponse(_SUCCESS)


class _PullLines(PullStream):
    """A stream of lines of JSON. The last line has the status `success` or an error."""

    stream_type = _LINES_TYPE.encode()

    def encode(self, state: NodePull) -> bytes:
        """Return a new state of the download as one line of JSON."""
        pull = state.pull
        if pull.status == "done":
            return _line(_SUCCESS)
        if pull.status != "running":
            return _line(to_ollama_error(_pull_failure(state)))
        if pull.stage is None or pull.total is None:
            return _line({"status": "pulling manifest"})
        # Clients show one progress bar for each digest.
        digest = f"sha256:{hashlib.sha256(pull.model.encode()).hexdigest()}"
        progress = {"digest": digest, "total": pull.total, "completed": min(pull.done, pull.total)}
        return _line({"status": f"{pull.stage} {pull.model}"} | progress)

    def unchanged(self, state: NodePull) -> bytes:
        """Return the last line again, to keep the connection alive."""
        return self.encode(state)


def _line(value: object) -> bytes:
    return orjson.dumps(value) + b"\n"


def _pull_failure(state: NodePull) -> ApiError:
    pull = state.pull
    reason = "the download was canceled" if pull.status == "canceled" else pull.error or "the download failed"
    return ApiError(502, "pull_failed", f"node '{state.node}' has not downloaded model '{pull.model[:200]}': {reason}")


def _check_right(gateway: Gateway, principal: Principal | None) -> None:
    """Raise an error unless the client is an admin, or all clients may download."""
    if gateway.config.ollama.anyone_pulls or (principal is not None and principal.role == "admin"):
        return
    if principal is not None:
        raise ApiError(403, "admin_only", "only an admin may download models; send an admin's API key")
    raise ApiError(
        401, "invalid_api_key", "only an admin may download models; send an admin's API key, or use `helexa pull MODEL`"
    )


# The endpoints of the generation paths, as ASGI applications.
OLLAMA_ENDPOINTS = dict.fromkeys((CHAT_API, GENERATE_API, EMBED_API, EMBEDDINGS_API), OllamaGeneration())

ollama_routes = [
    *(Route(path, endpoint, methods=["POST"]) for path, endpoint in OLLAMA_ENDPOINTS.items()),
    _route("/api/tags", "GET", list_tags),
    _route("/api/ps", "GET", list_running),
    _route("/api/show", "POST", show_model),
    _route("/api/pull", "POST", pull),
    _route("/api/version", "GET", get_version, public),
    *(_route(path, "DELETE" if path == "/api/delete" else "POST", reject) for path in _NOT_IMPLEMENTED),
    _route(f"{BLOBS}{{digest}}", "POST", reject),
]
