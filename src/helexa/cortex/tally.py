"""Counts and histograms of one event loop, told to Prometheus when it scrapes.

The client library's own take a lock for each number, which costs a request more than being routed. These are its
metric families with plain numbers in them.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

T = TypeVar("T")


class Count:
    """A sum that only grows.

    Attributes:
        value: the sum.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Histogram:
    """How many values were at most each of some bounds, and their sum.

    Args:
        bounds: in ascending order.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add a series of these labels."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric(labels, buckets, self._sum)


class Tallies(Generic[T]):
    """Everything counted for each combination of labels, made when it is first asked for.

    Args:
        labels: their names.
        make: what is counted for one combination.
    """

    def __init__(self, labels: Sequence[str], make: Callable[[], T]) -> None:
        self.labels = labels
        self._make = make
        self._made: dict[tuple[str, ...], T] = {}

    def of(self, *values: str) -> T:
        """What is counted for these values of the labels."""
        found = self._made.get(values)
        if found is None:
            found = self._made[values] = self._make()
        return found

    def counter(self, name: str, text: str, pick: Callable[[T], Count]) -> Metric:
        """One counter of all combinations, as it stands."""
        family = CounterMetricFamily(name, text, labels=self.labels)
        for values, tally in self._made.items():
            family.add_metric(values, pick(tally).value)
        return family

    def histogram(self, name: str, text: str, pick: Callable[[T], Histogram]) -> Metric:
        """One histogram of all combinations, as it stands."""
        family = HistogramMetricFamily(name, text, labels=self.labels)
        for values, tally in self._made.items():
            pick(tally).add_to(family, values)
        return family
