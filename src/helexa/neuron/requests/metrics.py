"""Prometheus metrics of a node.

The number of label values is bounded: labels are routes, HTTP statuses, error codes and loaded models.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from helexa.core.node_reports import Health, ModelInfo, ModelLoad
from helexa.neuron.requests.request_and_run_records import RequestRecord, RunRecord

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"

_OTHER = "other"
_MAX_MODELS = 100  # number of model labels; further models are counted as `other`
_DURATION = (0.005, 0.05, 0.25, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
_PHASE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)

disable_created_metrics()  # otherwise, each counter and histogram has a `_created` series, which no dashboard reads


class Metrics:
    """Prometheus metrics of a node: finished requests, and collectors."""

    def __init__(self, routes: Mapping[Callable[..., Any], str]) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._routes = routes  # path of each route, by endpoint function. The path is the value of the label `route`.
        self._models: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"neuron_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"neuron_{name}_seconds", text, labels, registry=registry, buckets=buckets)

        self._requests = counter("requests", "Requests by route and HTTP status", "route", "status")
        self._duration = histogram(
            "request_duration", "Seconds from the request to the end of the response", _DURATION, "route"
        )
        self._error_responses = counter("refusals", "Error responses by error code", "code")
        self._runs = counter("runs", "Runs of a model by finish reason", "model", "finish_reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of runs", "model")
        self._cached = counter("cached_prompt_tokens", "Prompt tokens found in the KV cache", "model")
        self._completion = counter("completion_tokens", "Generated tokens", "model")
        self._first_token = histogram(
            "time_to_first_token", "Seconds from the prompt to the first token", _FIRST_TOKEN, "model"
        )
        self._queue = histogram("queue", "Seconds that a run waited for its first engine step", _PHASE, "model")
        self._prefill = histogram("prefill", "Seconds of a run's prefill", _PHASE, "model")
        self._decode = histogram("decode", "Seconds of a run's decoding", _PHASE, "model")
        self._token = histogram("time_per_output_token", "Seconds between two tokens of an answer", _TOKEN, "model")

    def observe(self, record: RequestRecord, endpoint: Callable[..., Any] | None) -> None:
        """Count a finished request and its runs (one for each generated answer)."""
        route = _OTHER if endpoint is None else self._routes.get(endpoint, _OTHER)
        self._requests.labels(route, str(record.status)).inc()
        self._duration.labels(route).observe(record.duration)
        for code in record.error_codes:
            self._error_responses.labels(code).inc()
        for run in record.runs:
            self._observe_run(run)

    def watch(self, collector: Collector) -> None:
        """Include the metrics of `collector` in each result of `text`."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """Return all metrics with their current values in the Prometheus text format."""
        return generate_latest(self._registry)

    def _observe_run(self, run: RunRecord) -> None:
        model = run.model if run.model in self._models or len(self._models) < _MAX_MODELS else _OTHER
        self._models.add(model)
        self._runs.labels(model, run.reason).inc()
        self._prompt.labels(model).inc(run.prompt_tokens)
        self._cached.labels(model).inc(run.cached_tokens)
        self._completion.labels(model).inc(run.completion_tokens)
        self._queue.labels(model).observe(run.queue)
        if run.first_token is not None:
            self._first_token.labels(model).observe(run.first_token)
            self._prefill.labels(model).observe(run.prefill)
            self._decode.labels(model).observe(run.decode)
            if run.completion_tokens > 1:
                self._token.labels(model).observe(run.decode / (run.completion_tokens - 1))


class NodeCollector(Collector):
    """Reports `GET /health` and `GET /models` as Prometheus metrics."""

    def __init__(
        self,
        health: Callable[[], Health],
        models: Callable[[], Iterable[ModelInfo]],
        events: Mapping[str, int],
    ) -> None:
        self._health = health
        self._models = models
        self._events = events

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the node, its devices and its models."""
        health = self._health()
        yield _gauge("uptime_seconds", "Seconds since the start of the node", [((), health.uptime_secs)])
        yield _gauge("memory_free_bytes", "Free memory of the host", [((), (health.memory_free_mb or 0) << 20)])
        yield _gauge("memory_total_bytes", "Total memory of the host", [((), (health.memory_total_mb or 0) << 20)])
        yield _gauge("models_loading", "Running loads", [((), len(health.loading))])
        for name, text, field, factor in _DEVICE:
            values = [((str(device.index),), getattr(device, field) * factor) for device in health.devices]
            yield _gauge(f"device_{name}", text, values, "device")
        for name, text, field, factor in _MODEL:
            values = [((model.id,), getattr(model, field) * factor) for model in health.models]
            yield _gauge(f"model_{name}", text, values, "model")
        usage = [
            ((model.id,), (model.kv_pages_total - model.kv_pages_free) / model.kv_pages_total)
            for model in health.models
            if model.kv_pages_total
        ]
        yield _gauge("model_kv_usage_ratio", "Fraction of the KV pages that running requests use", usage, "model")
        rejected = CounterMetricFamily(
            "neuron_model_rejections", "Rejected requests by reason", labels=("model", "reason")
        )
        for model in health.models:
            for field in _REJECTIONS:
                rejected.add_metric((model.id, field.removeprefix("rejected_")), getattr(model, field))
        yield rejected
        hits = CounterMetricFamily(
            "neuron_model_prefix_hits", "Prompts whose beginning was cached", labels=("model", "tier")
        )
        tokens = CounterMetricFamily(
            "neuron_model_prefix_tokens", "Prompt tokens that were cached", labels=("model", "tier")
        )
        for model in health.models:
            for tier, (prompt_count, token_count) in model.prefix_tiers().items():
                hits.add_metric((model.id, tier), prompt_count)
                tokens.add_metric((model.id, tier), token_count)
        yield from (hits, tokens)
        for name, text, field, factor in _DISK_READS:
            reads = CounterMetricFamily(f"neuron_model_{name}", text, labels=("model",))
            for model in health.models:
                reads.add_metric((model.id,), getattr(model, field) * factor)
            yield reads
        images = CounterMetricFamily(
            "neuron_model_images", "Images by whether they were encoded or reused", labels=("model", "result")
        )
        for model in health.models:
            images.add_metric((model.id, "encoded"), model.encoded_images_total)
            images.add_metric((model.id, "reused"), model.reused_images_total)
        yield images
        drafts = CounterMetricFamily(
            "neuron_model_drafts",
            "Verified drafts (predicted tokens) by their source and by whether they were accepted",
            labels=("model", "source", "result"),
        )
        for model in health.models:
            for source in ("ngram", "model"):
                verified, accepted = (
                    getattr(model, f"{source}_drafts_total"),
                    getattr(model, f"accepted_{source}_drafts_total"),
                )
                drafts.add_metric((model.id, source, "accepted"), accepted)
                drafts.add_metric((model.id, source, "rejected"), verified - accepted)
        yield drafts
        gains = [((model.id,), model.draft_gain) for model in health.models if model.draft_gain]
        yield _gauge(
            "model_draft_gain", "Estimated speed with the draft model divided by the speed without it", gains, "model"
        )
        events = CounterMetricFamily("neuron_model_events", "Loads, unloads and engine deaths", labels=("event",))
        for event, count in self._events.items():
            events.add_metric((event,), count)
        yield events
        up = [((model.id,), int(model.status in ("loaded", "sleeping"))) for model in self._models()]
        yield _gauge("model_up", "1 if the model is loaded or sleeping, else 0", up, "model")


# name, help text, field of the health report, factor from the field's unit to the metric's unit
_DEVICE = (
    ("memory_used_bytes", "Used memory", "vram_used_mb", 1 << 20),
    ("memory_free_bytes", "Free memory", "vram_free_mb", 1 << 20),
    ("utilization_ratio", "Utilization, 0 to 1", "utilization_pct", 0.01),
    ("temperature_celsius", "Temperature in degrees Celsius", "temp_c", 1),
    ("memory_used_mib", "Former name of neuron_device_memory_used_bytes, in MiB", "vram_used_mb", 1),
    ("memory_free_mib", "Former name of neuron_device_memory_free_bytes, in MiB", "vram_free_mb", 1),
    ("utilization_percent", "Former name of neuron_device_utilization_ratio, in percent", "utilization_pct", 1),
)
_MODEL = (
    ("running", "Running requests", "in_flight", 1),
    ("waiting", "Waiting requests", "queue_depth", 1),
    ("max_running", "Limit of running requests", "max_in_flight", 1),
    ("max_waiting", "Limit of waiting requests", "max_queue_depth", 1),
    ("kv_pages", "KV pages", "kv_pages_total", 1),
    ("kv_pages_free", "Free KV pages", "kv_pages_free", 1),
    ("kv_budget_bytes", "Memory of the KV cache", "kv_budget_mb", 1 << 20),
    ("kv_available_bytes", "Memory of the KV cache that is neither used nor reserved", "kv_available_mb", 1 << 20),
    ("kv_budget_mib", "Former name of neuron_model_kv_budget_bytes, in MiB", "kv_budget_mb", 1),
    ("kv_available_mib", "Former name of neuron_model_kv_available_bytes, in MiB", "kv_available_mb", 1),
    ("saved_prompts_bytes", "Size of the prompts on disk that the model can read", "saved_prompts_mb", 1 << 20),
    ("prefill_tokens_per_second", "Moving average of the prefill rate", "tok_s_prefill", 1),
    ("decode_tokens_per_second", "Moving average of the decode rate", "tok_s_decode", 1),
)
_DISK_READS = (
    ("prefix_read_bytes", "Bytes of KV pages read from disk", "disk_read_bytes_total", 1),
    ("prefix_read_seconds", "Duration of reads of KV pages from disk", "disk_read_ms_total", 0.001),
)
_REJECTIONS = [name for name in ModelLoad.model_fields if name.startswith("rejected_")]


def _gauge(name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"neuron_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
