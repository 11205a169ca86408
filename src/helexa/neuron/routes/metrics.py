"""Serve `GET /metrics` in the text format of Prometheus."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.neuron.requests.metrics import TEXT_FORMAT


async def metrics(request: Request) -> Response:
    """Handle `GET /metrics`: return all metrics of the node. Does not wait for engines."""
    return Response(request.app.state.metrics.text(), headers={"content-type": TEXT_FORMAT})


routes = [Route("/metrics", metrics)]
