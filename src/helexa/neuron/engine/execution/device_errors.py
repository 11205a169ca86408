"""Classifies errors in a step: broken device, out of memory, ranks out of step."""

from collections.abc import Iterator

from helexa.core.errors import HelexaError
from helexa.neuron import tensors

_MOST_STRIKES = 3
_DEVICE_WORDS = ("CUDA error", "cuDNN error", "HIP error", "Triton Error")  # how messages of device errors begin


class DeviceError(HelexaError):
    """The requested device does not exist on this machine, or torch cannot use it."""


class OutOfStepError(HelexaError):
    """A rank failed in a step, so the ranks no longer compute the same step."""


def is_device_fault(error: BaseException) -> bool:
    """Return whether `error` leaves the device or the group of ranks unusable."""
    return any(
        isinstance(link, tensors.AcceleratorError | OutOfStepError)
        or (type(link) is RuntimeError and str(link).startswith(_DEVICE_WORDS))
        # The error of the device is often not `error` itself, but its `__cause__`.
        for link in _chain(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that the device or the host ran out of memory."""
    return any(
        isinstance(link, tensors.OutOfMemoryError | MemoryError) or _is_allocator_error(link) for link in _chain(error)
    )


def release_frames(error: BaseException) -> None:
    """Remove the traceback of `error`, whose local variables keep tensors alive."""
    for link in _chain(error):
        link.__traceback__ = None


class OutOfMemoryCounter:
    """Counts consecutive steps that ran out of memory."""

    def __init__(self) -> None:
        self._count = 0

    def reset(self) -> None:
        """Set the count to zero, after a successful step."""
        self._count = 0

    def strike(self) -> bool:
        """Count a failed step; return whether the last `_MOST_STRIKES` steps have failed."""
        self._count += 1
        # The requests of one step may cause a single failure. Several failures in a row mean that the process itself
        # has too little memory.
        return self._count >= _MOST_STRIKES


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, then the errors that caused it (`__cause__`, `__context__`)."""
    visited = set[int]()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        # An error raised in an `except` block without `from` has a `__context__`, but no `__cause__`.
        error = error.__cause__ or error.__context__


def _is_allocator_error(error: BaseException) -> bool:
    # Torch's CPU allocator raises a plain RuntimeError.
    return type(error) is RuntimeError and "allocate memory" in str(error)
