"""Mergeable histograms: what is left of a sample's requests when their rows are pruned.

Buckets grow by 2 %, so any quantile is within 1 % of the truth, also after a merge.
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

_GAMMA = 1.02
_LOG_GAMMA = math.log(_GAMMA)
_ZERO = -(2**31)  # the bucket of what is not above zero


class Histogram:
    """Counts of positive values in buckets of equal relative width."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._counts = Counter(counts or {})

    @property
    def n(self) -> int:
        """How many values it has taken."""
        return self._counts.total()

    def add(self, values: Iterable[float]) -> None:
        """Take values."""
        self._counts.update(math.ceil(math.log(value) / _LOG_GAMMA) if value > 0 else _ZERO for value in values)

    def merge(self, other: "Histogram") -> None:
        """Take all that another one has taken."""
        self._counts.update(other._counts)

    def quantile(self, share: float) -> float | None:
        """The value below which this share of all values lies; None without any."""
        rank = share * (self.n - 1)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen > rank:
                return 0.0 if bucket == _ZERO else 2 * _GAMMA**bucket / (_GAMMA + 1)
        return None

    def items(self) -> list[tuple[int, int]]:
        """Buckets and their counts, in order."""
        return sorted(self._counts.items())


def pack(values: Mapping[str, Sequence[float]]) -> bytes | None:
    """A histogram for each metric that has values, as bytes; None without any."""
    histograms: dict[str, list[tuple[int, int]]] = {}
    for name, sample in values.items():
        if sample:
            histogram = Histogram()
            histogram.add(sample)
            histograms[name] = histogram.items()
    return zlib.compress(json.dumps(histograms, separators=(",", ":")).encode()) if histograms else None


def unpack(packed: bytes | None) -> dict[str, Histogram]:
    """The histograms by metric."""
    if packed is None:
        return {}
    return {name: Histogram(dict(items)) for name, items in json.loads(zlib.decompress(packed)).items()}
