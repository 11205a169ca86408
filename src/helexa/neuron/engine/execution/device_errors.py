"""Classifies the exceptions of failed steps."""

from collections.abc import Iterator

import torch

_MOST_STRIKES = 3
_DEVICE_WORDS = ("CUDA error", "cuDNN error", "HIP error", "Triton Error")  # RuntimeError prefixes


def is_device_fault(error: BaseException) -> bool:
    """Return whether the device, or torch's state of the device, is unusable after `error`."""
    return any(
        isinstance(link, torch.AcceleratorError) or (type(link) is RuntimeError and str(link).startswith(_DEVICE_WORDS))
        for link in _chain(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the host ran out of memory."""
    return any(
        isinstance(link, torch.OutOfMemoryError | MemoryError) or _is_allocator_error(link) for link in _chain(error)
    )


def release_frames(error: BaseException) -> None:
    """Release the local variables that an exception holds through its traceback."""
    for link in _chain(error):
        link.__traceback__ = None


class Strikes:
    """Counts consecutive steps that ran out of memory.

    The requests of a step may cause one failure. Several failures in a row are a problem of the process.
    """

    def __init__(self) -> None:
        self._count = 0

    def reset(self) -> None:
        """Reset the count after a successful step."""
        self._count = 0

    def strike(self) -> bool:
        """Count a failed step; return whether the limit is reached."""
        self._count += 1
        return self._count >= _MOST_STRIKES


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes and contexts."""
    visited = set[int]()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_allocator_error(error: BaseException) -> bool:
    # Torch's CPU allocator raises a plain RuntimeError.
    return type(error) is RuntimeError and "allocate memory" in str(error)
