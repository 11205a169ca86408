"""Count an engine's progress in memory that the engine and its server share.

The engine increments the count during its work: after each item of a native kernel, each layer, each piece of a file.
The server compares two readings. If the count does not change, the engine hangs; if it grows, the engine is alive, even
if slow. An increment costs nanoseconds and needs no thread, message or system call.
"""

import ctypes
import mmap
import os
import struct
import tempfile

_COUNTS = struct.Struct("=2q")  # Python's count and the native kernels' count; each has one writer at a time
_SIZE = mmap.PAGESIZE


class _Engine:
    """The counts of this process: in private memory until `attach`."""

    counts = (ctypes.c_int64 * 2)()


class Heartbeat:
    """The server's side: shared memory for the count of one engine.

    Attributes:
        fd: descriptor of the memory, for the engine to inherit; valid until `release_fd`.
    """

    def __init__(self) -> None:
        self.fd = _shared_memory()
        try:
            self._memory = mmap.mmap(self.fd, _SIZE)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def count(self) -> int:
        """Number of progress increments of the engine; it only grows."""
        return sum(_COUNTS.unpack_from(self._memory))

    def release_fd(self) -> None:
        """Close the descriptor. The memory stays mapped."""
        os.close(self.fd)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()


def attach(fd: int) -> None:
    """Use the shared memory behind `fd` for the counts. Called once, when an engine process starts."""
    memory = mmap.mmap(fd, _SIZE)
    os.close(fd)
    _Engine.counts = (ctypes.c_int64 * 2).from_buffer(memory)


def beat() -> None:
    """Increment the engine's progress count."""
    _Engine.counts[0] += 1


def kernel_count_address() -> int:
    """Return the address of the int64 that the native kernels increment."""
    return ctypes.addressof(_Engine.counts) + ctypes.sizeof(ctypes.c_int64)


def _shared_memory() -> int:
    """Return a descriptor of anonymous zeroed memory."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("helexa-heartbeat", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _SIZE)
    return fd
