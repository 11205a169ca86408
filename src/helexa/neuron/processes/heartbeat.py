"""The heartbeat of an engine process: a counter of progress in memory that the engine shares with the server process.

The engine increments the counter during its work: after each work item of a native kernel, each layer of the model and
each chunk of a file. The server reads the counter from time to time. If the value has not changed, the engine hangs. If
it has grown, the engine works, even if it is slow. An increment costs nanoseconds and needs no thread, message or
system call.
"""

import ctypes
import mmap
import os
import struct

from helexa.neuron.processes import shared_memory

_COUNTS = struct.Struct("=2q")  # counter of Python code and counter of native kernels; each has one writer at a time
_SIZE = mmap.PAGESIZE


class _Engine:
    """The progress counters of this engine process: one for Python code and one for native kernels.

    The counters are in private memory until `attach` moves them to the memory that is shared with the server.
    """

    counts = (ctypes.c_int64 * 2)()


class Heartbeat:
    """The shared memory with the progress counters of one engine, in the server process.

    Attributes:
        fd: file descriptor of the shared memory. The engine process inherits it. Valid until `release_fd` is called.
    """

    def __init__(self) -> None:
        self.fd = shared_memory.create("helexa-heartbeat", _SIZE)
        try:
            self._memory = mmap.mmap(self.fd, _SIZE)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def count(self) -> int:
        """Sum of the engine's progress counters. It grows as long as the engine works."""
        return sum(_COUNTS.unpack_from(self._memory))

    def release_fd(self) -> None:
        """Close the file descriptor `fd` in this process. The shared memory stays mapped."""
        os.close(self.fd)

    def close(self) -> None:
        """Unmap the shared memory."""
        self._memory.close()


def attach(fd: int) -> None:
    """Move this process's progress counters to the shared memory with the file descriptor `fd`, and close `fd`.

    An engine process calls this function once, when it starts.
    """
    memory = mmap.mmap(fd, _SIZE)
    os.close(fd)
    _Engine.counts = (ctypes.c_int64 * 2).from_buffer(memory)


def beat() -> None:
    """Increment the progress counter of this engine process, to show the server that the engine does not hang."""
    _Engine.counts[0] += 1


def kernel_count_address() -> int:
    """Return the memory address of the int64 progress counter that the native kernels increment."""
    return ctypes.addressof(_Engine.counts) + ctypes.sizeof(ctypes.c_int64)
