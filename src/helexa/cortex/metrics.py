"""The gateway's Prometheus metrics.

The number of label values is limited, because labels name only known models, configured nodes and known keys.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.node_reports import DeviceHealth, ModelLoad
from helexa.core.version import __version__
from helexa.cortex.fleet.breaker import ANY
from helexa.cortex.fleet.fleet import Fleet, FleetView
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.shutdown import Drain

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
_NODE_JOIN_COUNTERS = {"node_joins": "Attempts of nodes to join with an invitation"}
_KEY_COUNTERS = {
    "spend_tokens": "Charged tokens",
    "spend_prompt_tokens": "Charged prompt tokens",
    "spend_completion_tokens": "Charged completion tokens",
}
_MODEL_GAUGES = {
    "in_flight": "Running requests",
    "queue_depth": "Waiting requests",
    "max_in_flight": "Maximum number of running requests",
    "max_queue_depth": "Maximum number of waiting requests",
    "anon_in_flight": "Running requests without a key",
    "anon_max_in_flight": "Maximum number of running requests without a key",
    "tok_s_prefill": "Recent prompt tokens per second",
    "tok_s_decode": "Recent completion tokens per second",
}
_DEVICE_GAUGES = (  # name, help text, field of the node's health report, factor by which the field is multiplied
    ("memory_used_bytes", "Used memory", "vram_used_mb", 1 << 20),
    ("memory_free_bytes", "Free memory", "vram_free_mb", 1 << 20),
    ("utilization_ratio", "Utilization, 0 to 1", "utilization_pct", 0.01),
    ("temperature_celsius", "Temperature in degrees Celsius", "temp_c", 1),
    ("vram_used_mb", "Former name of cortex_device_memory_used_bytes, in MiB", "vram_used_mb", 1),
    ("vram_free_mb", "Former name of cortex_device_memory_free_bytes, in MiB", "vram_free_mb", 1),
    ("utilization_pct", "Former name of cortex_device_utilization_ratio, in percent", "utilization_pct", 1),
    ("temp_c", "Former name of cortex_device_temperature_celsius", "temp_c", 1),
)
_REJECTIONS = {
    "queue_full": "rejected_queue_full",
    "wait_timeout": "rejected_timeout",
    "per_principal": "rejected_per_principal",
    "anon_yield": "rejected_anon_yield",
    "kv_timeout": "rejected_kv_timeout",
    "kv_unservable": "rejected_kv_unservable",
}


class Histogram:
    """A histogram: values per bucket, and the sum of all values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds  # upper bounds of the buckets in ascending order
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add `value` to the histogram."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this histogram to a Prometheus metric family."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for upper_bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(upper_bound), total))
        family.add_metric(labels, buckets, self._sum)


class MetricGroup:
    """Several counters and histograms that have the same label names.

    Args:
        counters: help text of each counter, by metric name.
        histograms: help text and bucket bounds of each histogram, by metric name.
    """

    def __init__(
        self,
        labels: Sequence[str],
        counters: Mapping[str, str],
        histograms: Mapping[str, tuple[str, Sequence[float]]],
    ) -> None:
        self._labels, self._counters, self._histograms = labels, counters, histograms
        self._series: dict[tuple[str, ...], tuple[dict[str, int], dict[str, Histogram]]] = {}

    def series(self, *values: str) -> tuple[dict[str, int], dict[str, Histogram]]:
        """Return the counters and histograms with the label values `values`.

        Both are dictionaries by metric name. They are created at the first call with these values.
        """
        series = self._series.get(values)
        if series is None:
            histograms = {name: Histogram(bounds) for name, (_, bounds) in self._histograms.items()}
            series = self._series[values] = dict.fromkeys(self._counters, 0), histograms
        return series

    def collect(self) -> Iterator[Metric]:
        """Yield each counter and histogram as a Prometheus metric."""
        for name, text in self._counters.items():
            counter = CounterMetricFamily(f"cortex_{name}", text, labels=self._labels)
            for values, (counts, _) in self._series.items():
                counter.add_metric(values, counts[name])
            yield counter
        for name, (text, _) in self._histograms.items():
            histogram = HistogramMetricFamily(f"cortex_{name}", text, labels=self._labels)
            for values, (_, histograms) in self._series.items():
                histograms[name].add_to(histogram, values)
            yield histogram


class Metrics(Collector):
    """The gateway's Prometheus metrics, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._model_metrics = MetricGroup(("model", "node"), _MODEL_COUNTERS, _MODEL_HISTOGRAMS)
        self._key_metrics = MetricGroup(("account", "key"), _KEY_COUNTERS, {})
        self._node_joins = MetricGroup(("outcome",), _NODE_JOIN_COUNTERS, {})
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

    def node_join(self, outcome: str) -> None:
        """Count one attempt of a node to join."""
        self._node_joins.series(outcome)[0]["node_joins"] += 1

    def watch(self, collector: Collector) -> None:
        """Register `collector`, so that every scrape includes its metrics."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics per model, per key, per outcome of joins, and of the gateway."""
        for registry in (self._model_metrics, self._key_metrics, self._node_joins, self._gateway):
            yield from registry.collect()


def create_metrics_app(metrics: Metrics) -> Starlette:
    """Return the ASGI application of the metrics listener. It serves `GET /metrics`."""

    async def scrape(_request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": _TEXT_FORMAT})

    return Starlette(routes=[Route("/metrics", scrape)])


class GatewayCollector(Collector):
    """Collector of running requests, the ledger's state, and the version."""

    def __init__(self, drain: Drain, ledger_available: Callable[[], bool]) -> None:
        self._drain = drain  # counts the running requests
        # function that returns whether the last write to the ledger succeeded
        self._ledger_available = ledger_available

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that registering this collector reads no values."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their current values."""
        yield GaugeMetricFamily("cortex_requests_running", "Running requests", self._drain.running)
        yield GaugeMetricFamily("cortex_draining", "1 while the gateway shuts down, else 0", self._drain.begun)
        available = self._ledger_available()
        yield GaugeMetricFamily("cortex_ledger_up", "1 if the last write to the ledger succeeded, else 0", available)
        version = GaugeMetricFamily("cortex_build_info", "1; the label has the version", labels=["version"])
        version.add_metric([__version__], 1)
        yield version


class _ModelReading(NamedTuple):
    node: str
    load: ModelLoad


class _DeviceReading(NamedTuple):
    node: str
    device: DeviceHealth


class FleetCollector(Collector):
    """Prometheus collector that exports the last reported state of all nodes.

    The collector reads the state at each scrape, so removed nodes and models have no time series.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, because the nodes' metrics are unknown before a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of all nodes, models and devices."""
        view = self._fleet.view()
        nodes = view.nodes
        up = GaugeMetricFamily("cortex_node_up", "1 if the node answers its polls, else 0", labels=["node"])
        for node in nodes:
            up.add_metric([node.name], float(node.healthy))
        yield up
        yield _avoided(view)
        reporting = [node for node in nodes if node.healthy and node.health is not None]
        loads = [_ModelReading(node.name, load) for node in reporting if node.health for load in node.health.models]
        devices = [
            _DeviceReading(node.name, device) for node in reporting if node.health for device in node.health.devices
        ]
        yield from _model_metrics(loads)
        yield from _device_metrics(devices)


def _avoided(view: FleetView) -> Metric:
    gauge = GaugeMetricFamily(
        "cortex_model_avoided",
        "1 if the requests of all clients for the model go to other nodes because they fail on this node, else 0",
        labels=["node", "model", "reason"],
    )
    reasons = {
        "failing": {(node, model) for node, model, client in view.open if client == ANY},
        "ejected": {pair for pair, requester in view.ejected if requester.client == ANY},
    }
    for node in view.nodes:
        for model in node.models:
            for reason, pairs in reasons.items():
                gauge.add_metric([node.name, model, reason], float((node.name, model) in pairs))
    return gauge


def _model_metrics(readings: list[_ModelReading]) -> Iterator[Metric]:
    for name, text in _MODEL_GAUGES.items():
        gauge = GaugeMetricFamily(f"cortex_model_{name}", text, labels=["node", "model"])
        for node, load in readings:
            value = getattr(load, name)
            if value or "max_" not in name:  # a limit of 0 means that the node does not know the limit
                gauge.add_metric([node, load.id], value)
        yield gauge
    hits = CounterMetricFamily(
        "cortex_model_prefix_hits", "Prompts whose beginning was cached", labels=["node", "model", "tier"]
    )
    tokens = CounterMetricFamily(
        "cortex_model_prefix_tokens", "Prompt tokens that were cached", labels=["node", "model", "tier"]
    )
    saved = GaugeMetricFamily(
        "cortex_model_saved_prompts_bytes",
        "Size of the prompts on disk that the model can read",
        labels=["node", "model"],
    )
    for node, load in readings:
        for tier, (prompt_count, token_count) in load.prefix_tiers().items():
            hits.add_metric([node, load.id, tier], prompt_count)
            tokens.add_metric([node, load.id, tier], token_count)
        saved.add_metric([node, load.id], load.saved_prompts_mb << 20)
    yield from (hits, tokens, saved)
    rejections = CounterMetricFamily(
        "cortex_model_rejections", "Requests that the node rejected", labels=["node", "model", "reason"]
    )
    for node, load in readings:
        for reason, field in _REJECTIONS.items():
            rejections.add_metric([node, load.id, reason], getattr(load, field))
    yield rejections


def _device_metrics(readings: list[_DeviceReading]) -> Iterator[Metric]:
    for name, text, field, factor in _DEVICE_GAUGES:
        gauge = GaugeMetricFamily(f"cortex_device_{name}", text, labels=["node", "device"])
        for node, device in readings:
            gauge.add_metric([node, str(device.index)], getattr(device, field) * factor)
        yield gauge
