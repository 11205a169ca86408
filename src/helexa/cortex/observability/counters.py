"""Counters and histograms without locks. A scrape converts them to Prometheus metrics.

The counters of the library prometheus-client acquire a lock for each update. The counters in this module are plain
numbers, because only the event loop changes them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Histogram:
    """A histogram: the number of observed values per bucket, and the sum of all values.

    Args:
        bounds: upper bounds of the buckets in ascending order.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add `value` to the histogram."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this histogram to a Prometheus metric family, with `labels` as its label values."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for upper_bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(upper_bound), total))
        family.add_metric(labels, buckets, self._sum)


class MetricGroup:
    """Several counters and histograms that have the same label names.

    Args:
        labels: names of the labels.
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
        """Return the counters and histograms for the label values `values`, each in a dict by metric name.

        They are created with zeros at the first call for these label values.
        """
        series = self._series.get(values)
        if series is None:
            histograms = {name: Histogram(bounds) for name, (_, bounds) in self._histograms.items()}
            series = self._series[values] = dict.fromkeys(self._counters, 0), histograms
        return series

    def collect(self) -> Iterator[Metric]:
        """Yield each counter and histogram as a Prometheus metric, with one series per tuple of label values."""
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
