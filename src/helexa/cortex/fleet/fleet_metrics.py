"""Gauges of the nodes' reported state, read from the fleet at each scrape."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from helexa.core.fleet import DeviceHealth, ModelLoad
from helexa.cortex.fleet.fleet import Fleet

_MODEL_GAUGES = {
    "in_flight": "Requests now running",
    "queue_depth": "Requests now waiting",
    "max_in_flight": "Requests that may run",
    "max_queue_depth": "Requests that may wait",
    "anon_in_flight": "Requests without a key now running",
    "anon_max_in_flight": "Requests without a key that may run",
    "tok_s_prefill": "Prompt tokens per second, lately",
    "tok_s_decode": "Completion tokens per second, lately",
}
_DEVICE_GAUGES = {
    "vram_used_mb": "Memory in use, MiB",
    "vram_free_mb": "Memory free, MiB",
    "utilization_pct": "Utilisation, percent",
    "temp_c": "Temperature, degrees Celsius",
}
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
    """Reads the state of the fleet at each scrape, so that removed nodes and models leave no series behind."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: they are unknown before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family per metric."""
        nodes = self._fleet.view().nodes
        up = GaugeMetricFamily("cortex_node_up", "Whether the node answers", labels=["node"])
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
        "cortex_model_rejections", "Requests that the node refused", labels=["node", "model", "reason"]
    )
    for node, load in readings:
        for reason, field in _REJECTIONS.items():
            rejections.add_metric([node, load.id, reason], getattr(load, field))
    yield rejections


def _device_metrics(readings: list[_DeviceReading]) -> Iterator[Metric]:
    for name, text in _DEVICE_GAUGES.items():
        gauge = GaugeMetricFamily(f"cortex_device_{name}", text, labels=["node", "device"])
        for node, device in readings:
            gauge.add_metric([node, str(device.index)], getattr(device, name))
        yield gauge
