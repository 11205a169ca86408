"""`GET /v1/models` and `GET /v1/models/{id}`: what is served, in OpenAI's shape."""

import time

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.wire.openai_models import model_entry, model_list
from helexa.neuron.model import ServedModel


async def list_models(request: Request) -> Response:
    """List the models that are loaded."""
    models: list[ServedModel] = request.app.state.registry.models()
    created = int(time.time())
    return _json(model_list([model_entry(model.info(), created) for model in models]))


async def show_model(request: Request) -> Response:
    """Describe one model."""
    model: ServedModel = request.app.state.registry.get(request.path_params["model_id"])
    return _json(model_entry(model.info(), int(time.time())))


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


routes = [Route("/v1/models", list_models), Route("/v1/models/{model_id:path}", show_model)]
