"""`GET /metrics`: what the node counts, as Prometheus reads it."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.neuron.requests.metrics import TEXT_FORMAT


async def metrics(request: Request) -> Response:
    """The Prometheus text; never waits for an engine."""
    return Response(request.app.state.metrics.text(), headers={"content-type": TEXT_FORMAT})


routes = [Route("/metrics", metrics)]
