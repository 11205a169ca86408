"""Reads and writes KV pages and recurrent states as bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor


class CacheBytes:
    """Reads and writes the KV pages, or the state slots, of one rank as bytes.

    Args:
        caches: tensors whose first dimension is the page or the slot.
        on_cpu: whether the tensors are in host memory.
    """

    def __init__(self, caches: Sequence[Tensor], on_cpu: bool) -> None:
        self._caches = [(cache, _raw(cache) if on_cpu else None) for cache in caches]

    @tensors.inference_mode()
    def read(self, index: int) -> bytes:
        """Return a copy of the page or slot number `index`, with the parts of all layers."""
        return b"".join((_copied(cache[index]) if raw is None else raw[index]).data for cache, raw in self._caches)

    @tensors.inference_mode()
    def write(self, index: int, contents: bytes | memoryview) -> None:
        """Replace the page or slot number `index` by `contents`, a result of `read`."""
        values, start = np.frombuffer(contents, np.uint8), 0
        for cache, raw in self._caches:
            if raw is not None:
                end = start + raw.shape[1]
                raw[index] = values[start:end]
            else:
                part = cache[index]
                end = start + part.nbytes
                part.copy_(tensors.from_numpy(values[start:end].copy()).view(part.dtype).view(part.shape))
            start = end


def _raw(cache: Tensor) -> NDArray[np.uint8] | None:
    """Return a view of a cache as uint8 [pages or slots, bytes per page or slot].

    Return None if the bytes of a page are not contiguous, as in the caches of plain torch.
    """
    try:
        return cache.view(-1).view(tensors.uint8).numpy().reshape(cache.shape[0], -1)
    except (RuntimeError, ValueError):  # torch and numpy raise these errors if the view is impossible without a copy
        return None


def _copied(part: Tensor) -> NDArray[np.uint8]:
    return part.contiguous().cpu().view(-1).view(tensors.uint8).numpy()
