"""Serve `GET /metrics` in Prometheus' text format."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.neuron.requests.metrics import TEXT_FORMAT


async def metrics(request: Request) -> Response:
    """Return all metrics without waiting for an engine."""
    return Response(request.app.state.metrics.text(), headers={"content-type": TEXT_FORMAT})


routes = [Route("/metrics", metrics)]
