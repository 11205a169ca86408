"""Prometheus metrics of the nodes: availability, running and waiting requests, memory and temperature."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from helexa.core.fleet import DeviceHealth, ModelLoad
from helexa.cortex.fleet.fleet import Fleet

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
_DEVICE_GAUGES = (  # name, help text, field of the node's health report, factor from the field's unit
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
        nodes = self._fleet.view().nodes
        up = GaugeMetricFamily("cortex_node_up", "1 if the node answers its polls, else 0", labels=["node"])
        for node in nodes:
            up.add_metric([node.name], float(node.healthy))
        yield up
        reporting = [node for node in nodes if node.healthy and node.health is not None]
        loads = [_ModelReading(node.name, load) for node in reporting if node.health for load in node.health.models]
        devices = [
            _DeviceReading(node.name, device) for node in reporting if node.health for device in node.health.devices
        ]
        yield from _model_metrics(loads)
        yield from _device_metrics(devices)


def _model_metrics(readings: list[_ModelReading]) -> Iterator[Metric]:
    for name, text in _MODEL_GAUGES.items():
        gauge = GaugeMetricFamily(f"cortex_model_{name}", text, labels=["node", "model"])
        for node, load in readings:
            value = getattr(load, name)
            if value or "max_" not in name:  # 0 means that the node does not know the limit
                gauge.add_metric([node, load.id], value)
        yield gauge
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
