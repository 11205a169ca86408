"""Routes that load, unload and describe models. The body of most of their error responses is `{"error": "text"}`."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import (
    ApiError,
    DoesNotFitError,
    HelexaError,
    SourceError,
    TensorParallelError,
    internal_error,
    shutting_down,
)
from helexa.core.fleet import ModelSpec
from helexa.core.logs import tell
from helexa.core.wire.request import to_api_error
from helexa.http.json_response import JsonResponse
from helexa.neuron.lifecycle.registry import CudaUnavailableError, Registry, bare_id
from helexa.neuron.requests.request_record import current
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.error_response import descriptor_shortage, log_error_response
from helexa.neuron.routes.load_stream import LOOK_SECONDS, LoadStream

log = logging.getLogger(__name__)

_PHRASES = {400: "load_failed", 404: "model_not_found", 503: "service_unavailable"}

_LONGEST_NAME = 1000

BodyT = TypeVar("BodyT", bound=BaseModel)


class UnloadRequest(BaseModel):
    """Request body of `POST /models/unload`."""

    model_id: str = Field(min_length=1, max_length=_LONGEST_NAME)


class LoadRequest(ModelSpec):
    """Request body of `POST /models/load`: the model to load, and whether to stream progress events."""

    model_id: str = Field(min_length=1, max_length=_LONGEST_NAME)
    source: str | None = Field(default=None, max_length=_LONGEST_NAME)
    quant: str | None = Field(default=None, max_length=_LONGEST_NAME)
    tool_parser: str | None = Field(default=None, max_length=_LONGEST_NAME)
    stream: bool = False


async def models(request: Request) -> Response:
    """Handle `GET /models`: return the status of all models on the node, including those being loaded."""
    registry = _registry(request)
    return JsonResponse([info.json_dict() for info in (*registry.infos(), *registry.loading())])


async def load(request: Request) -> Response | LoadStream:
    """Handle `POST /models/load`: load a model, and respond when it is loaded or the load has failed.

    If the client requests a stream, the response is a stream of progress events. But if the load ends within
    `LOOK_SECONDS`, the client gets the same JSON response as without a stream.
    """
    load_request = _parse(LoadRequest, await read_json(request))
    watch = _Watch(_registry(request), load_request)
    if load_request.stream or "text/event-stream" in request.headers.get("accept", ""):
        await asyncio.wait([watch.load], timeout=LOOK_SECONDS)
        if not watch.load.done():
            return LoadStream(watch.load, watch.progress, lambda: _last_event(request, load_request, watch.load))
    try:
        await watch.load
    except ApiError:
        raise
    except HelexaError as error:
        return _rejected(request, *_load_failure(load_request, error))
    return JsonResponse({"status": "loaded"})


async def unload(request: Request) -> Response:
    """Handle `POST /models/unload`: unload a model, and respond when its memory is free."""
    unload_request = _parse(UnloadRequest, await read_json(request))
    try:
        await _registry(request).unload(unload_request.model_id)
    except ApiError as error:
        if error.code != "model_not_found":
            raise
        return _rejected(request, 404, {"error": str(error)})
    return JsonResponse({"status": "unloaded"})


async def endpoint(request: Request) -> Response:
    """Handle `GET /models/{id}/endpoint`: return the URL of this node, or an error if the model is not loaded."""
    model_id = request.path_params["model_id"]
    try:
        _registry(request).get(model_id)
    except ApiError as error:
        return _rejected(request, error.status, {"error": str(error)})
    return JsonResponse({"url": f"http://localhost:{request.app.state.port}"})


async def capabilities(request: Request) -> Response:
    """Handle `GET /models/{id}/capabilities`: return the capabilities of a loaded model, or a 404 if not loaded."""
    model_id = request.path_params["model_id"]
    try:
        model = _registry(request).get(model_id)
    except ApiError as error:
        return _rejected(request, 404, {"error": str(error)})
    return JsonResponse({"capabilities": model.info().capabilities})


class _Watch:
    """Starts the load of a model for one request, and records its latest progress."""

    def __init__(self, registry: Registry, spec: ModelSpec) -> None:
        self._registry = registry
        self._id = bare_id(spec.model_id)
        self._progress: dict[str, Any] | None = None
        self.load = asyncio.create_task(registry.load(spec, self._on_progress))

    def progress(self) -> dict[str, Any] | None:
        """Return the latest progress of the load as data for a `progress` event, or None if unknown.

        If an earlier request has started a load of the same model, return the progress of that load.
        """
        if self._progress is not None:
            return self._progress
        info = next((info for info in self._registry.loading() if info.id == self._id), None)
        return None if info is None else {"stage": info.stage, "fraction": info.progress}

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        fraction = round(done / total, 4) if total else None
        self._progress = {"stage": stage, "done": done, "total": total or None, "fraction": fraction}


def _load_failure(spec: ModelSpec, error: HelexaError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the response body for a load that has failed with `error`."""
    match error:
        case SourceError() | DoesNotFitError() | TensorParallelError():
            reason = {"kind": error.kind, "message": str(error)} | {"model_id": spec.model_id} | error.details
            return 422, {"error": reason}
        case CudaUnavailableError():
            return 503, {"error": str(error), "code": "cuda_unavailable"}
    return 400, {"error": str(error)}


def _last_event(request: Request, spec: ModelSpec, load: "asyncio.Task[Any]") -> tuple[str, dict[str, Any]]:
    """Return the name and the data of the last event of a load stream: `loaded` or `error`.

    The data of an `error` event contains the HTTP status and the body that a response without streaming would have.
    """
    error = shutting_down() if load.cancelled() else load.exception()
    if error is None:
        return "loaded", {"status": "loaded"}
    if shortage := descriptor_shortage(error):
        error = shortage
    if not isinstance(error, HelexaError):
        log.error("loading %s failed", spec.model_id, exc_info=error)
        error = internal_error()
    if isinstance(error, ApiError):
        log_error_response(request.url.path, error)
        return "error", {"status": error.status, **error.envelope()}
    status, body = _load_failure(spec, error)
    _log_rejection(request, status, body)
    return "error", {"status": status, **body}


def _registry(request: Request) -> Registry:
    return request.app.state.registry


def _parse(kind: type[BodyT], body: bytes) -> BodyT:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise to_api_error(error) from None


def _rejected(request: Request, status: int, body: dict[str, Any]) -> Response:
    _log_rejection(request, status, body)
    return JsonResponse(body, status)


def _log_rejection(request: Request, status: int, body: dict[str, Any]) -> None:
    error = body["error"]
    code = error["kind"] if isinstance(error, Mapping) else body.get("code", _PHRASES.get(status, "refused"))
    current().error_codes.append(code)
    tell(log, logging.WARNING, "refused", path=request.url.path, status=status, code=code, error=error)


# Model ids contain slashes, written as `/` or `%2F`.
routes = [
    Route("/models", models),
    Route("/models/load", load, methods=["POST"]),
    Route("/models/unload", unload, methods=["POST"]),
    Route("/models/{model_id:path}/endpoint", endpoint),
    Route("/models/{model_id:path}/capabilities", capabilities),
]
