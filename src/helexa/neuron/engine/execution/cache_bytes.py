"""Reads and writes KV pages and recurrent states as bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor


class CacheBytes:
    """The KV pages, or the state slots, of all layers of one rank as bytes.

    Args:
        caches: tensors whose first dimension is the page or the slot.
        on_cpu: whether they are in the memory of the host.
    """

    def __init__(self, caches: Sequence[Tensor], on_cpu: bool) -> None:
        self._caches = [(cache, _raw(cache) if on_cpu else None) for cache in caches]

    @tensors.inference_mode()
    def read(self, index: int) -> bytes:
        """Return a copy of a page or a slot in all layers."""
        return b"".join((_copied(cache[index]) if raw is None else raw[index]).data for cache, raw in self._caches)

    @tensors.inference_mode()
    def write(self, index: int, contents: bytes | memoryview) -> None:
        """Replace a page or a slot by bytes from `read`."""
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
    """Return the memory of a tensor as bytes [pages, bytes of a page].

    None if a page is scattered over the memory, as in plain torch.
    """
    try:
        return cache.view(-1).view(tensors.uint8).numpy().reshape(cache.shape[0], -1)
    except (RuntimeError, ValueError):  # of torch and numpy: such a view does not exist
        return None


def _copied(part: Tensor) -> NDArray[np.uint8]:
    return part.contiguous().cpu().view(-1).view(tensors.uint8).numpy()
