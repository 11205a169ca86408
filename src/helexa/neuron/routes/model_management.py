"""Routes that load, unload, download and describe models.

The body of most error responses is `{"error": "text"}`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from helexa.core.errors import (
    ApiError,
    DoesNotFitError,
    HelexaError,
    SourceError,
    TensorParallelError,
    internal_error,
    service_unavailable,
    shutting_down,
)
from helexa.core.load_options import ModelId
from helexa.core.logs import quoted, tell
from helexa.core.model_source_ids import ModelSource, bare_id
from helexa.core.node_reports import ModelSpec, PullRequest, Record
from helexa.core.sse import KEEP_ALIVE, frame
from helexa.core.wire.request import to_api_error
from helexa.http.responses import JsonResponse
from helexa.neuron.builtin_models import source_text
from helexa.neuron.cache_folder import delete_saved, saved_prompts
from helexa.neuron.lifecycle.load_preparation import CudaUnavailableError
from helexa.neuron.lifecycle.local_inventory import LocalInventory
from helexa.neuron.lifecycle.pulls import Pulls
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.requests.request_and_run_records import current
from helexa.neuron.routes.replies_disconnects_and_errors import (
    KEEP_ALIVE_SECONDS,
    STREAM_HEADERS,
    descriptor_shortage,
    disconnected,
    log_error_response,
    read_json,
)

log = logging.getLogger(__name__)

_PHRASES = {400: "load_failed", 404: "model_not_found", 503: "service_unavailable"}

_LONGEST_NAME = 1000

BodyT = TypeVar("BodyT", bound=BaseModel)

LOOK_SECONDS = 0.25


class ModelRequest(BaseModel):
    """Request body of `POST /models/unload` and `POST /models/sleep`."""

    model_id: ModelId


class KeepRequest(ModelRequest):
    """Request body of `POST /models/keep`."""

    idle_unload_secs: float = Field(ge=0, allow_inf_nan=False)


class LoadRequest(ModelSpec):
    """Body of `POST /models/load`: the model, and whether to stream progress."""

    source: str | None = Field(default=None, max_length=_LONGEST_NAME)
    quant: str | None = Field(default=None, max_length=_LONGEST_NAME)
    tool_parser: str | None = Field(default=None, max_length=_LONGEST_NAME)
    draft_model: str | None = Field(default=None, max_length=_LONGEST_NAME)
    stream: bool = False


class LoadStream:
    """An ASGI response with `progress` events, then `loaded` or `error`.

    If the client disconnects, the stream ends but the load continues.
    """

    def __init__(
        self,
        load: asyncio.Task[Any],
        progress: Callable[[], dict[str, Any] | None],
        outcome: Callable[[], tuple[str, dict[str, Any]]],
    ) -> None:
        # Task that waits for the load. The stream cancels this task when it ends. Canceling the task must not cancel
        # the load.
        self._load = load
        # function that returns the data of a `progress` event, or None if the progress is unknown
        self._progress = progress
        # Function that returns the name and the data of the last event. It is called when `load` is done.
        self._outcome = outcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the load has ended or the client disconnects."""
        disconnect = asyncio.create_task(disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            sent_progress, last_sent = None, time.monotonic()
            while not self._load.done():
                await asyncio.wait((self._load, disconnect), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if disconnect.done():
                    return
                progress = self._progress()
                if progress is not None and progress != sent_progress:
                    sent_progress, last_sent = progress, time.monotonic()
                    await _write(send, frame(orjson.dumps(progress), "progress"))
                elif time.monotonic() - last_sent >= KEEP_ALIVE_SECONDS:
                    last_sent = time.monotonic()
                    await _write(send, KEEP_ALIVE)
            event, data = self._outcome()
            await _write(send, frame(orjson.dumps(data), event))
            await send({"type": "http.response.body", "body": b""})
        finally:
            disconnect.cancel()
            self._load.cancel()


async def _write(send: Send, frames: bytes) -> None:
    await send({"type": "http.response.body", "body": frames, "more_body": True})


async def models(request: Request) -> Response:
    """Handle `GET /models`: list all models, including those being loaded."""
    registry = _registry(request)
    return JsonResponse([info.json_dict() for info in (*registry.infos(), *registry.loading())])


async def load(request: Request) -> Response | LoadStream:
    """Handle `POST /models/load`: load a model, and respond when the load has ended.

    If the client requests a stream, the response is a stream of progress events, unless the load ends within
    `LOOK_SECONDS`. In this case, the response is the same JSON as without a stream.
    """
    load_request = parse(LoadRequest, await read_json(request))
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
    """Handle `POST /models/unload`: respond when the model's memory is free."""
    model_request = parse(ModelRequest, await read_json(request))
    try:
        await _registry(request).unload(model_request.model_id)
    except ApiError as error:
        if error.code != "model_not_found":
            raise
        return _rejected(request, 404, {"error": str(error)})
    return JsonResponse({"status": "unloaded"})


async def sleep(request: Request) -> Response:
    """Handle `POST /models/sleep`: respond when the idle model's memory is free."""
    model_request = parse(ModelRequest, await read_json(request))
    await _registry(request).sleep(model_request.model_id)
    return JsonResponse({"status": "sleeping"})


async def keep(request: Request) -> Response:
    """Handle `POST /models/keep`: change the idle time after which a model sleeps."""
    keep_request = parse(KeepRequest, await read_json(request))
    _registry(request).keep(keep_request.model_id, keep_request.idle_unload_secs)
    return JsonResponse({"idle_unload_secs": keep_request.idle_unload_secs})


async def endpoint(request: Request) -> Response:
    """Handle `GET /models/{id}/endpoint`: return the node's URL if the model is ready."""
    model_id = request.path_params["model_id"]
    try:
        _registry(request).get(model_id)
    except ApiError as error:
        return _rejected(request, error.status, {"error": str(error)})
    return JsonResponse({"url": f"http://localhost:{request.app.state.port}"})


async def capabilities(request: Request) -> Response:
    """Handle `GET /models/{id}/capabilities`: return a loaded model's capabilities."""
    model_id = request.path_params["model_id"]
    try:
        model = _registry(request).get(model_id)
    except ApiError as error:
        return _rejected(request, 404, {"error": str(error)})
    return JsonResponse({"capabilities": model.info().capabilities})


async def clear_prefix_cache(request: Request) -> Response:
    """Handle `DELETE /models/{id}/prefix-cache`: forget prompts in memory and on disk.

    If the model has no running engine, only its saved prompts on disk are deleted.
    """
    model_id = bare_id(request.path_params["model_id"])
    registry = _registry(request)
    model, error_text = None, ""
    # The engine of a quarantined model has ended, and `registry.get` would raise an error.
    is_quarantined = any(failed.model_id == model_id for failed in registry.poisoned())
    try:
        model = None if is_quarantined else registry.get(model_id)
    except ApiError as error:
        if error.code != "model_not_found":
            raise
        error_text = str(error)
    awake = model is not None and model.engine.alive
    if not awake:
        await registry.until_asleep(model_id)  # until then, the ending engine may save prompts to disk
    # The files are listed before the engine clears its cache, because files that the engine saves after that contain
    # newer prompts, which must stay.
    saved = [entry for entry in await asyncio.to_thread(saved_prompts) if model_id in entry.models]
    if model is None and not saved and not is_quarantined:
        return _rejected(request, 404, {"error": error_text})
    if model is not None and (awake or model.engine.alive):  # the model may have woken during the listing
        try:
            await model.engine.clear_prefixes()  # raises an error if the engine has ended during the listing
        except TimeoutError:
            raise service_unavailable(
                f"the engine of model '{model_id}' is busy with a long step; retry in 5 s", retry_after=5
            ) from None
    try:
        deleted = await asyncio.to_thread(delete_saved, saved)
    except OSError as error:
        folders = ", ".join(sorted({str(entry.files[0].parent) for entry in saved}))
        raise internal_error(
            f"saved prompts of model '{model_id}' cannot be deleted: {error}; delete the folder {folders}"
        ) from None
    tell(log, logging.INFO, "cleared prefix cache", model=model_id, deleted_bytes=deleted)
    return JsonResponse({"status": "cleared", "deleted_bytes": deleted})


class _Watch:
    """Starts the load of a model for one request, and records its latest progress."""

    def __init__(self, registry: Registry, spec: ModelSpec) -> None:
        self._registry = registry
        self._id = bare_id(spec.model_id)
        self._progress: dict[str, Any] | None = None
        self.load = asyncio.create_task(registry.load(spec, self._on_progress))

    def progress(self) -> dict[str, Any] | None:
        """Return the load's latest progress for an event, or None if unknown.

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
    """Return HTTP status and body for a load that failed with `error`."""
    match error:
        case SourceError() | DoesNotFitError() | TensorParallelError():
            reason = {"kind": error.kind, "message": str(error)} | {"model_id": spec.model_id} | error.details
            return 422, {"error": reason}
        case CudaUnavailableError():
            return 503, {"error": str(error), "code": "cuda_unavailable"}
    return 400, {"error": str(error)}


def _last_event(request: Request, spec: ModelSpec, load: "asyncio.Task[Any]") -> tuple[str, dict[str, Any]]:
    """Return name and data of a load stream's last event."""
    # The data of an `error` event contains the HTTP status and the body that a response without streaming would have.
    error = shutting_down() if load.cancelled() else load.exception()
    if error is None:
        return "loaded", {"status": "loaded"}
    if shortage := descriptor_shortage(error):
        error = shortage
    if not isinstance(error, HelexaError):
        log.error("load failed with an internal error model=%s", quoted(spec.model_id), exc_info=error)
        error = internal_error()
    if isinstance(error, ApiError):
        log_error_response(request.url.path, error)
        return "error", {"status": error.status, **error.envelope()}
    status, body = _load_failure(spec, error)
    _log_rejection(request, status, body)
    return "error", {"status": status, **body}


def _registry(request: Request) -> Registry:
    return request.app.state.registry


def parse(kind: type[BodyT], body: bytes) -> BodyT:
    """Parse and validate the request body, and return it as an object of class `kind`.

    Raises:
        ApiError: 400: a field is missing or invalid.
    """
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


class _Cancel(Record):
    """Body of `POST /models/pull/cancel`."""

    model: ModelId


async def local_models(request: Request) -> Response:
    """Handle `GET /models/local`: list the models on this node's disks."""
    inventory: LocalInventory | None = request.app.state.inventory
    if inventory is None:
        raise ApiError(
            404,
            "local_models_disabled",
            "this node does not report the models on its disks; set local_models = true in its neuron.toml",
        )
    return JsonResponse((await inventory.current()).json_dict())


async def pull(request: Request) -> Response:
    """Handle `POST /models/pull`: start a download, and return its state."""
    body = parse(PullRequest, await read_json(request))
    try:
        return JsonResponse(_pulls(request).start(body).json_dict(), 202)
    except SourceError as error:
        raise ApiError(400, "invalid_source", str(error), param="model") from None


async def pulls(request: Request) -> Response:
    """Handle `GET /models/pulls`: list the running and the last ended downloads."""
    return JsonResponse({"pulls": [pull.json_dict() for pull in _pulls(request).all()]})


async def cancel(request: Request) -> Response:
    """Handle `POST /models/pull/cancel`: cancel a download, which a new pull resumes."""
    body = parse(_Cancel, await read_json(request))
    canceled = _pulls(request).cancel(body.model)
    if canceled is None:
        raise ApiError(
            404,
            "pull_not_found",
            f"model '{body.model[:200]}' is not being downloaded; GET /models/pulls lists downloads",
            param="model",
        )
    return JsonResponse(canceled.json_dict())


async def estimate(request: Request) -> Response:
    """Handle `POST /models/estimate`: estimate the memory that a load would take.

    The body is that of a load request. In the response, `memory_mb` includes the draft model, and is null if the memory
    is unknown.
    """
    inventory: LocalInventory | None = request.app.state.inventory
    spec = parse(ModelSpec, await read_json(request))
    if inventory is None:
        return JsonResponse({"memory_mb": None})
    sizes_mb: list[int | None] = []
    try:
        for part in (spec, *([ModelSpec(model_id=spec.draft_model)] if spec.draft_model else [])):
            source = ModelSource.parse(source_text(part), request.app.state.default_source)
            sizes_mb.append(await inventory.estimate_mb(source, source.quant(part.quant)))
        return JsonResponse({"memory_mb": None if None in sizes_mb else sum(filter(None, sizes_mb))})
    except SourceError as error:
        raise ApiError(400, error.kind, str(error), param="source") from None


def _pulls(request: Request) -> Pulls:
    return request.app.state.pulls


# Model ids contain slashes, which clients send as `/` or `%2F`. Therefore, the parameter has the type `path`.
routes = [
    Route("/models/local", local_models),
    Route("/models/estimate", estimate, methods=["POST"]),
    Route("/models/pull", pull, methods=["POST"]),
    Route("/models/pull/cancel", cancel, methods=["POST"]),
    Route("/models/pulls", pulls),
    Route("/models", models),
    Route("/models/load", load, methods=["POST"]),
    Route("/models/unload", unload, methods=["POST"]),
    Route("/models/sleep", sleep, methods=["POST"]),
    Route("/models/keep", keep, methods=["POST"]),
    Route("/models/{model_id:path}/endpoint", endpoint),
    Route("/models/{model_id:path}/prefix-cache", clear_prefix_cache, methods=["DELETE"]),
    Route("/models/{model_id:path}/capabilities", capabilities),
]
