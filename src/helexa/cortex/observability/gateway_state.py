"""Prometheus metrics of the gateway's current state."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from helexa.core.version import __version__
from helexa.http.drain import Drain


class GatewayCollector(Collector):
    """Collector of the gateway's running requests, the state of its ledger, and its version.

    Args:
        drain: counts the running requests.
        ledger_available: function that returns whether the last write to the ledger succeeded.
    """

    def __init__(self, drain: Drain, ledger_available: Callable[[], bool]) -> None:
        self._drain = drain
        self._ledger_available = ledger_available

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that the registration does not read the state."""
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
