"""Prometheus metrics, in a registry of their own. Labels are bounded: only known models and configured nodes appear."""

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.cortex.exchange import Exchange

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model", "node")
_DURATION = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
_FIRST_TOKEN = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
_RATE = (1, 2.5, 5, 10, 15, 20, 30, 40, 60, 80, 120, 200)

disable_created_metrics()  # one more series per counter and histogram that no dashboard reads


class _Children:
    """All metrics bound to one (model, node)."""

    def __init__(self, metrics: "Metrics", model: str, node: str) -> None:
        self.requests = metrics.requests.labels(model, node)
        self.errors = metrics.errors.labels(model, node)
        self.cold_starts = metrics.cold_starts.labels(model, node)
        self.duration = metrics.duration.labels(model, node)
        self.first_token = metrics.first_token.labels(model, node)
        self.rate = metrics.rate.labels(model, node)
        self.prompt = metrics.prompt.labels(model, node)
        self.completion = metrics.completion.labels(model, node)
        self.cached = metrics.cached.labels(model, node)


class Metrics:
    """What the gateway counts."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"cortex_{name}", text, _LABELS, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"cortex_{name}", text, _LABELS, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests, however they ended")
        self.errors = counter("request_errors", "Requests refused, or failed on the node's side")
        self.cold_starts = counter("cold_starts", "Models loaded because a request asked for them")
        self.duration = histogram("request_duration_seconds", "From request to the end of the answer", _DURATION)
        self.first_token = histogram("time_to_first_token_seconds", "To the first content of a stream", _FIRST_TOKEN)
        self.rate = histogram("tokens_per_second", "Completion tokens per second", _RATE)
        self.prompt = counter("prompt_tokens", "Prompt tokens, as nodes report them")
        self.completion = counter("completion_tokens", "Completion tokens, as nodes report them")
        self.cached = counter("cached_prompt_tokens", "Prompt tokens served from a node's cache")
        self._children: dict[tuple[str, str], _Children] = {}

    def observe(self, exchange: Exchange) -> None:
        """Count one ended exchange."""
        bound = self._bound(exchange.model, exchange.node)
        bound.requests.inc()
        bound.duration.observe(exchange.duration)
        if exchange.failed:
            bound.errors.inc()
        if (first_token := exchange.time_to_first_token) is not None:
            bound.first_token.observe(first_token)
        if (rate := exchange.tokens_per_second) is not None:
            bound.rate.observe(rate)
        if exchange.usage is not None:
            bound.prompt.inc(exchange.usage.prompt)
            bound.completion.inc(exchange.usage.completion)
            bound.cached.inc(exchange.usage.cached)

    def cold_start(self, model: str, node: str) -> None:
        """Count one load that succeeded."""
        self._bound(model, node).cold_starts.inc()

    def text(self) -> bytes:
        """The Prometheus text exposition."""
        return generate_latest(self.registry)

    def _bound(self, model: str, node: str) -> _Children:
        children = self._children.get((model, node))
        if children is None:
            children = self._children[model, node] = _Children(self, model, node)
        return children


def create_metrics_app(metrics: Metrics) -> Starlette:
    """The second listener: `GET /metrics`."""

    async def scrape(_request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": _TEXT_FORMAT})

    return Starlette(routes=[Route("/metrics", scrape)])
