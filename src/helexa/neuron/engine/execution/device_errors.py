"""What a failed step says of the device: pure decisions on exceptions."""

from collections.abc import Iterator

import torch

_MOST_STRIKES = 3
_DEVICE_WORDS = ("CUDA error", "cuDNN error", "HIP error", "Triton Error")  # of errors without a type of their own


def is_device_fault(error: BaseException) -> bool:
    """Whether the device, or what torch knows of it, can no longer be trusted."""
    return any(
        isinstance(link, torch.AcceleratorError) or (type(link) is RuntimeError and str(link).startswith(_DEVICE_WORDS))
        for link in _chain(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, the device's or the machine's."""
    return any(isinstance(link, torch.OutOfMemoryError | MemoryError) or _no_room(link) for link in _chain(error))


def let_go(error: BaseException) -> None:
    """Give up what an exception holds by its traceback: all that the functions had at hand that it came through."""
    for link in _chain(error):
        link.__traceback__ = None


class Strikes:
    """Counts steps in a row that ran out of memory.

    One such step may be its requests' doing; if nothing succeeds any more, it is not.
    """

    def __init__(self) -> None:
        self._count = 0

    def sound(self) -> None:
        """A step went well."""
        self._count = 0

    def out(self) -> bool:
        """A step did not; whether that was one too many."""
        self._count += 1
        return self._count >= _MOST_STRIKES


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and what it was raised from or while handling."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _no_room(error: BaseException) -> bool:
    # Torch's allocator for CPUs has no type of its own for this.
    return type(error) is RuntimeError and "allocate memory" in str(error)
