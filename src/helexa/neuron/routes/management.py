"""Loading, unloading and describing models. Failures here are flat: `{"error": "text"}`."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError, HelexaError, SourceError, invalid_body, malformed_json
from helexa.core.fleet import ModelSpec
from helexa.core.logs import tell
from helexa.neuron.exchange import current
from helexa.neuron.registry import Registry
from helexa.neuron.routes.body import read_json
from helexa.neuron.routes.health import json_response

log = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=BaseModel)


class UnloadRequest(BaseModel):
    """`POST /models/unload`."""

    model_id: str = Field(min_length=1)


async def models(request: Request) -> Response:
    """`GET /models`: every loaded, recovering or loading model; never waits for an engine."""
    registry = _registry(request)
    return json_response([info.json_dict() for info in (*registry.infos(), *registry.loading())])


async def load(request: Request) -> Response:
    """`POST /models/load`: answers when the model serves, or with the reason why it cannot."""
    spec = _parsed(ModelSpec, await read_json(request))
    try:
        await _registry(request).load(spec)
    except ApiError:
        raise
    except SourceError as error:
        body = {"kind": error.kind, "message": str(error)} | {"model_id": spec.model_id} | error.details
        return _refused(request, 422, body)
    except HelexaError as error:
        return _refused(request, 400, str(error))
    return json_response({"status": "loaded"})


async def unload(request: Request) -> Response:
    """`POST /models/unload`: answers when the model's memory is free."""
    wanted = _parsed(UnloadRequest, await read_json(request))
    try:
        await _registry(request).unload(wanted.model_id)
    except ApiError as error:
        if error.code != "model_not_found":
            raise
        return _refused(request, 404, str(error))
    return json_response({"status": "unloaded"})


async def endpoint(request: Request) -> Response:
    """`GET /models/{id}/endpoint`: where the model is served."""
    model_id = request.path_params["model_id"]
    try:
        _registry(request).get(model_id)
    except ApiError as error:
        return _refused(request, error.status, str(error))
    return json_response({"url": f"http://localhost:{request.app.state.port}"})


async def capabilities(request: Request) -> Response:
    """`GET /models/{id}/capabilities`: what a loaded model can do; 404 means "cannot say"."""
    model_id = request.path_params["model_id"]
    try:
        model = _registry(request).get(model_id)
    except ApiError as error:
        return _refused(request, 404, str(error))
    return json_response({"capabilities": model.info().capabilities})


def _registry(request: Request) -> Registry:
    return request.app.state.registry


def _parsed(kind: type[BodyT], body: bytes) -> BodyT:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise malformed_json(first["msg"]) from None
        where = ".".join(str(part) for part in first["loc"])
        raise invalid_body(f"{where or 'body'}: {first['msg']}", where or None) from None


def _refused(request: Request, status: int, error: str | Mapping[str, object]) -> Response:
    code = str(error["kind"]) if isinstance(error, Mapping) else HTTPStatus(status).phrase.lower().replace(" ", "_")
    current().refusals.append(code)
    tell(log, logging.WARNING, "refused", path=request.url.path, status=status, code=code, error=error)
    return json_response({"error": error}, status)


# The ids have slashes in them, written as such or as %2F.
routes = [
    Route("/models", models),
    Route("/models/load", load, methods=["POST"]),
    Route("/models/unload", unload, methods=["POST"]),
    Route("/models/{model_id:path}/endpoint", endpoint),
    Route("/models/{model_id:path}/capabilities", capabilities),
]
