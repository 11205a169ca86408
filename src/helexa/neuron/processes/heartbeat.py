"""The heartbeat of an engine: progress counters in shared memory.

The engine increments the counters during its work: after each work item of a native kernel, each layer of the model and
each chunk of a file. The server reads the sum of the counters from time to time. If the sum has not changed, the engine
hangs. If the sum has grown, the engine works, even if it is slow. An increment costs nanoseconds and needs no thread,
message or system call.

During a step, the memory also contains the expected duration of the step, from which the server derives how long the
engine may make no progress.
"""

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from helexa.neuron.processes import heaps_and_shared_memory

_COUNTS = struct.Struct("=2q")  # counter of Python code and counter of native kernels; each has one writer at a time
_EXPECTED = struct.Struct("=q")  # expected nanoseconds of the step in progress; stored after the counters; 0 if unknown
_SIZE = mmap.PAGESIZE


class _Engine:
    """Progress counters of this process and expected duration of its step."""

    counts = (ctypes.c_int64 * 3)()


class Heartbeat:
    """The server's view of one engine's progress counters in shared memory."""

    def __init__(self) -> None:
        # File descriptor of the shared memory. The engine process inherits it. Valid until `release_fd` is called.
        self.fd = heaps_and_shared_memory.create_shared("helexa-heartbeat", _SIZE)
        try:
            self._memory = mmap.mmap(self.fd, _SIZE)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def count(self) -> int:
        """Sum of the engine's progress counters. It grows as long as the engine works."""
        return sum(_COUNTS.unpack_from(self._memory))

    @property
    def expected_seconds(self) -> float:
        """Expected seconds of the step in progress; 0 if unknown or none."""
        return _EXPECTED.unpack_from(self._memory, _COUNTS.size)[0] / 1e9

    def release_fd(self) -> None:
        """Close the file descriptor `fd` in this process. The shared memory stays mapped."""
        os.close(self.fd)

    def close(self) -> None:
        """Unmap the shared memory."""
        self._memory.close()


def attach(fd: int) -> None:
    """Move this process's counters to the shared memory `fd`, and close `fd`."""
    memory = mmap.mmap(fd, _SIZE)
    os.close(fd)
    _Engine.counts = (ctypes.c_int64 * 3).from_buffer(memory)


def beat() -> None:
    """Increment this engine's progress counter, to show that the engine does not hang."""
    _Engine.counts[0] += 1


@contextmanager
def step_of(expected_seconds: float) -> Iterator[None]:
    """Report the expected duration of the step in this context to the server.

    `expected_seconds` is 0 if the duration is unknown, or if an engine that does not hang may make no progress for
    longer than the step.
    """
    _Engine.counts[2] = int(expected_seconds * 1e9)
    try:
        yield
    finally:
        _Engine.counts[2] = 0


def kernel_count_address() -> int:
    """Return the address of the native kernels' counter (int64), which `attach` moves."""
    return ctypes.addressof(_Engine.counts) + ctypes.sizeof(ctypes.c_int64)
