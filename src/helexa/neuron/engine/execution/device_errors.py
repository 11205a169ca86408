"""Kinds of errors of a device in a step, and the memory that steps allocate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import HelexaError
from helexa.neuron import tensors

_MOST_STRIKES = 3
_DEVICE_WORDS = ("CUDA error", "cuDNN error", "HIP error", "Triton Error")  # RuntimeError prefixes

_ALLOWANCE = 1.1  # factor for a step's memory, because no tensor fits into some of the allocator's free blocks


class DeviceError(HelexaError):
    """The requested device does not exist on this machine, or torch cannot use it."""


class OutOfStepError(HelexaError):
    """A rank failed in a step, so the ranks no longer compute the same step."""


def is_device_fault(error: BaseException) -> bool:
    """Return whether the device or the group of ranks is unusable after `error`."""
    return any(
        isinstance(link, tensors.AcceleratorError | OutOfStepError)
        or (type(link) is RuntimeError and str(link).startswith(_DEVICE_WORDS))
        # The kernel's error is often the cause of another error.
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
        """Set the count to zero. Called after a successful step."""
        self._count = 0

    def strike(self) -> bool:
        """Count a failed step; return whether it was the last one that is tolerated."""
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
        # An error that is raised while another is handled has only a context.
        error = error.__cause__ or error.__context__


def _is_allocator_error(error: BaseException) -> bool:
    # Torch's CPU allocator raises a plain RuntimeError.
    return type(error) is RuntimeError and "allocate memory" in str(error)


@dataclass(frozen=True)
class DeviceMemory:
    """Measured memory of one GPU, in bytes."""

    weights: int  # allocated for the weights
    step: int  # allocated by the largest step, in addition to the weights and caches
    free: int  # free memory, including the memory that the process holds


class StepMemory:
    """Measures the memory of the steps between its construction and `read`.

    Args:
        weights: bytes that are allocated for the weights.
        cuda: module that provides memory statistics; None for `torch.cuda`.
    """

    def __init__(self, weights: int, cuda: Any = None) -> None:
        self._weights = weights
        self._cuda = cuda = tensors.cuda if cuda is None else cuda
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        self._before = cuda.memory_allocated()

    def read(self) -> DeviceMemory:
        """Wait until the steps have ended, and return the measured sizes."""
        cuda = self._cuda
        cuda.synchronize()
        step = int((cuda.max_memory_allocated() - self._before) * _ALLOWANCE)
        cuda.empty_cache()
        return DeviceMemory(self._weights, step, cuda.mem_get_info()[0] + cuda.memory_reserved())
