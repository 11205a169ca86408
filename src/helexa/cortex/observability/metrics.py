"""Prometheus metrics in their own registry.

Label values are bounded: known models, configured nodes, known keys.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.cortex.observability.counters import MetricGroup
from helexa.cortex.observability.request_record import RequestRecord

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_DURATION = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
_FIRST_TOKEN = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
_RATE = (1, 2.5, 5, 10, 15, 20, 30, 40, 60, 80, 120, 200)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)

_PLACE_COUNTERS = {
    "requests": "Requests, however they ended",
    "request_errors": "Requests refused, or failed on the node's side",
    "cold_starts": "Models loaded because a request asked for them",
    "evictions": "Models unloaded by the gateway",
    "prompt_tokens": "Prompt tokens, as nodes report them",
    "completion_tokens": "Completion tokens, as nodes report them",
    "cached_prompt_tokens": "Prompt tokens served from a node's cache",
    "images_requests": "Requests for images",
}
_PLACE_HISTOGRAMS = {
    "request_duration_seconds": ("From request to the end of the answer", _DURATION),
    "time_to_first_token_seconds": ("To the first content of a stream", _FIRST_TOKEN),
    "tokens_per_second": ("Completion tokens per second", _RATE),
}
_GATEWAY_HISTOGRAMS = {
    "gateway_overhead_seconds": (
        "From request to asking the node, without waiting for loads and request bodies",
        _OVERHEAD,
    ),
}
_PAYER_COUNTERS = {
    "spend_tokens": "Tokens billed",
    "spend_prompt_tokens": "Prompt tokens billed",
    "spend_completion_tokens": "Completion tokens billed",
}


class Metrics(Collector):
    """The gateway's metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._places = MetricGroup(("model", "node"), _PLACE_COUNTERS, _PLACE_HISTOGRAMS)
        self._payers = MetricGroup(("account", "key"), _PAYER_COUNTERS, {})
        self._gateway = MetricGroup((), {}, _GATEWAY_HISTOGRAMS)
        self._overhead = self._gateway.of()[1]["gateway_overhead_seconds"]
        self.watch(self)

    def observe(self, exchange: RequestRecord) -> None:
        """Count one ended request."""
        model_counters, histograms = self._places.of(exchange.model, exchange.node)
        model_counters["requests"] += 1
        histograms["request_duration_seconds"].observe(exchange.duration)
        if exchange.failed:
            model_counters["request_errors"] += 1
        if exchange.api == "/v1/images/generations":
            model_counters["images_requests"] += 1
        if (overhead := exchange.overhead) is not None:
            self._overhead.observe(overhead)
        if (first_token := exchange.time_to_first_token) is not None:
            histograms["time_to_first_token_seconds"].observe(first_token)
        if (rate := exchange.tokens_per_second) is not None:
            histograms["tokens_per_second"].observe(rate)
        usage = exchange.usage
        if usage is not None:
            model_counters["prompt_tokens"] += usage.prompt
            model_counters["completion_tokens"] += usage.completion
            model_counters["cached_prompt_tokens"] += usage.cached
            if exchange.principal is not None:
                spend_counters, _ = self._payers.of(exchange.principal.account_id, exchange.principal.key_id)
                spend_counters["spend_tokens"] += usage.prompt + usage.completion
                spend_counters["spend_prompt_tokens"] += usage.prompt
                spend_counters["spend_completion_tokens"] += usage.completion

    def cold_start(self, model: str, node: str) -> None:
        """Count one successful load."""
        self._places.of(model, node)[0]["cold_starts"] += 1

    def eviction(self, model: str, node: str) -> None:
        """Count one successful unload."""
        self._places.of(model, node)[0]["evictions"] += 1

    def watch(self, collector: Collector) -> None:
        """Collect from `collector` too, at every scrape."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for registry in (self._places, self._payers, self._gateway):
            yield from registry.collect()


def create_metrics_app(metrics: Metrics) -> Starlette:
    """Return the ASGI app of the metrics listener: `GET /metrics`."""

    async def scrape(_request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": _TEXT_FORMAT})

    return Starlette(routes=[Route("/metrics", scrape)])
