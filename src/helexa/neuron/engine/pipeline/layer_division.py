"""Divides the decoder layers of a model among hosts by their free memory. The function has no side effects."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from helexa.core.errors import HelexaError


def divide_layers(layer_bytes: Sequence[int], first_bytes: int, free_bytes: Sequence[int]) -> list[range]:
    """Return the contiguous layers of each host, such that the fullest host is as empty as possible.

    A host is full if its part of the model takes all of its free memory. Each host gets at least one layer.

    Args:
        layer_bytes: bytes of each layer.
        first_bytes: bytes of the embedding and the output head, which host 0 has in addition to its layers.
        free_bytes: free memory of each host.

    Raises:
        HelexaError: there are more hosts than layers.
    """
    layers, hosts = len(layer_bytes), len(free_bytes)
    if hosts > layers:
        raise HelexaError(f"a model of {layers} layers cannot be divided among {hosts} hosts")
    sums = [0, *accumulate(layer_bytes)]

    def fullness(host: int, start: int, stop: int) -> float:
        own_bytes = sums[stop] - sums[start] + (first_bytes if host == 0 else 0)
        return own_bytes / max(free_bytes[host], 1)

    @cache
    def best(host: int, start: int) -> tuple[float, tuple[int, ...]]:
        """Return the fullness of the fullest host from `host` on, and where the layers of each of these hosts end."""
        if host == hosts - 1:
            return fullness(host, start, layers), (layers,)
        candidates = []
        for stop in range(start + 1, layers - (hosts - host - 1) + 1):
            later, bounds = best(host + 1, stop)
            candidates.append((max(fullness(host, start, stop), later), (stop, *bounds)))
        return min(candidates)

    bounds = [0, *best(0, 0)[1]]
    return [range(start, stop) for start, stop in pairwise(bounds)]
