"""Serve `GET /v1/models` and `GET /v1/models/{id}` in OpenAI's format."""

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.fleet import ModelInfo
from helexa.core.wire.openai_models import model_entry, model_list
from helexa.http.json_response import JsonResponse
from helexa.neuron.lifecycle.model import ServedModel


async def list_models(request: Request) -> Response:
    """Handle `GET /v1/models`: list the models of this node, including models whose engine is being restarted."""
    infos: list[ModelInfo] = request.app.state.registry.infos()
    created = int(time.time())
    return JsonResponse(model_list([model_entry(info, created) for info in infos]))


async def show_model(request: Request) -> Response:
    """Handle `GET /v1/models/{id}`: describe one loaded model of this node."""
    model: ServedModel = request.app.state.registry.get(request.path_params["model_id"])
    return JsonResponse(model_entry(model.info(), int(time.time())))


routes = [Route("/v1/models", list_models), Route("/v1/models/{model_id:path}", show_model)]
