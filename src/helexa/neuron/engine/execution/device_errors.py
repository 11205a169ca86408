"""Errors of devices, and functions that classify the exceptions of failed steps."""

from collections.abc import Iterator

import torch

from helexa.core.errors import HelexaError

_MOST_STRIKES = 3
_DEVICE_WORDS = ("CUDA error", "cuDNN error", "HIP error", "Triton Error")  # RuntimeError prefixes


class DeviceError(HelexaError):
    """The requested device does not exist on this machine, or torch cannot use it."""


class OutOfStepError(HelexaError):
    """The ranks of an engine no longer compute the same step, because one of them failed in a step."""


def is_device_fault(error: BaseException) -> bool:
    """Return whether the device, or the group of ranks, is unusable after `error`, so that the engine must end."""
    return any(
        isinstance(link, torch.AcceleratorError | OutOfStepError)
        or (type(link) is RuntimeError and str(link).startswith(_DEVICE_WORDS))
        for link in _chain(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that the device or the host ran out of memory."""
    return any(
        isinstance(link, torch.OutOfMemoryError | MemoryError) or _is_allocator_error(link) for link in _chain(error)
    )


def release_frames(error: BaseException) -> None:
    """Remove the traceback of `error`. This frees the tensors to which local variables in the traceback refer."""
    for link in _chain(error):
        link.__traceback__ = None


class OutOfMemoryCounter:
    """Counts consecutive steps that ran out of memory.

    A single failure may be caused by the requests in the step. After several failures in a row, the process counts as
    faulty.
    """

    def __init__(self) -> None:
        self._count = 0

    def reset(self) -> None:
        """Set the count to zero. Called after a successful step."""
        self._count = 0

    def strike(self) -> bool:
        """Count a failed step. Return whether the maximum number of consecutive failures is reached."""
        self._count += 1
        return self._count >= _MOST_STRIKES


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, then the exceptions that caused it (`__cause__` or `__context__`)."""
    visited = set[int]()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_allocator_error(error: BaseException) -> bool:
    # Torch's CPU allocator raises a plain RuntimeError.
    return type(error) is RuntimeError and "allocate memory" in str(error)
