"""The gateway's Prometheus metrics.

The number of label values is limited, because labels name only known models, configured nodes and known keys.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
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

_MODEL_COUNTERS = {
    "requests": "Finished requests, successful or not",
    "request_errors": "Requests that were rejected or failed on the node's side",
    "cold_starts": "Model loads caused by a request",
    "evictions": "Models unloaded by the gateway",
    "prompt_tokens": "Prompt tokens reported by nodes",
    "completion_tokens": "Completion tokens reported by nodes",
    "cached_prompt_tokens": "Prompt tokens served from a node's cache",
    "images_requests": "Image generation requests",
}
_MODEL_HISTOGRAMS = {
    "request_duration_seconds": ("Time from the request's arrival to the end of the response", _DURATION),
    "time_to_first_token_seconds": ("Time from the request's arrival to the first content of a stream", _FIRST_TOKEN),
    "tokens_per_second": ("Completion tokens per second", _RATE),
}
_GATEWAY_HISTOGRAMS = {
    "gateway_overhead_seconds": (
        "Time from the request's arrival to its forwarding, without waiting for request bodies and model loads",
        _OVERHEAD,
    ),
}
_KEY_COUNTERS = {
    "spend_tokens": "Charged tokens",
    "spend_prompt_tokens": "Charged prompt tokens",
    "spend_completion_tokens": "Charged completion tokens",
}


class Metrics(Collector):
    """The gateway's Prometheus metrics, with a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._model_metrics = MetricGroup(("model", "node"), _MODEL_COUNTERS, _MODEL_HISTOGRAMS)
        self._key_metrics = MetricGroup(("account", "key"), _KEY_COUNTERS, {})
        self._gateway = MetricGroup((), {}, _GATEWAY_HISTOGRAMS)
        self._overhead = self._gateway.series()[1]["gateway_overhead_seconds"]
        self.watch(self)

    def observe(self, record: RequestRecord) -> None:
        """Add a finished request to the counters and histograms."""
        model_counters, histograms = self._model_metrics.series(record.model, record.node)
        model_counters["requests"] += 1
        histograms["request_duration_seconds"].observe(record.duration)
        if record.failed:
            model_counters["request_errors"] += 1
        if record.api == "/v1/images/generations":
            model_counters["images_requests"] += 1
        if (overhead := record.overhead) is not None:
            self._overhead.observe(overhead)
        if (first_token := record.time_to_first_token) is not None:
            histograms["time_to_first_token_seconds"].observe(first_token)
        if (rate := record.tokens_per_second) is not None:
            histograms["tokens_per_second"].observe(rate)
        usage = record.usage
        if usage is not None:
            model_counters["prompt_tokens"] += usage.prompt
            model_counters["completion_tokens"] += usage.completion
            model_counters["cached_prompt_tokens"] += usage.cached
            if record.principal is not None:
                spend_counters, _ = self._key_metrics.series(record.principal.account_id, record.principal.key_id)
                spend_counters["spend_tokens"] += usage.prompt + usage.completion
                spend_counters["spend_prompt_tokens"] += usage.prompt
                spend_counters["spend_completion_tokens"] += usage.completion

    def cold_start(self, model: str, node: str) -> None:
        """Count one successful model load that a request caused."""
        self._model_metrics.series(model, node)[0]["cold_starts"] += 1

    def eviction(self, model: str, node: str) -> None:
        """Count one successful unload of a model by the gateway."""
        self._model_metrics.series(model, node)[0]["evictions"] += 1

    def watch(self, collector: Collector) -> None:
        """Register `collector`, so that every scrape includes its metrics."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics per model, per key and for the whole gateway.

        Prometheus' registry calls this at each scrape.
        """
        for registry in (self._model_metrics, self._key_metrics, self._gateway):
            yield from registry.collect()


def create_metrics_app(metrics: Metrics) -> Starlette:
    """Return the ASGI application of the metrics listener. It serves `GET /metrics`."""

    async def scrape(_request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": _TEXT_FORMAT})

    return Starlette(routes=[Route("/metrics", scrape)])
