"""A count of an engine's progress, in memory that the engine and its server share.

The engine increments the count as it works: after each item of a native kernel, each layer, each piece of a file. The
server compares two readings: an engine whose count stands still hangs, and an engine whose count grows is alive,
however slow it is. An increment costs nanoseconds and needs no thread, no message and no system call.
"""

import ctypes
import mmap
import os
import struct
import tempfile

_COUNTS = struct.Struct("=2q")  # Python's count, the native kernels' count; each has one writer at a time
_SIZE = mmap.PAGESIZE


class _Engine:
    """The counts of this process: in its own memory until `attach`."""

    counts = (ctypes.c_int64 * 2)()


class Heartbeat:
    """The server's side: memory for the count of one engine.

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
        """How often the engine has made progress; it only grows."""
        return sum(_COUNTS.unpack_from(self._memory))

    def release_fd(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        os.close(self.fd)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()


def attach(fd: int) -> None:
    """Count in the memory behind a descriptor from now on. Called once, when an engine process starts."""
    memory = mmap.mmap(fd, _SIZE)
    os.close(fd)
    _Engine.counts = (ctypes.c_int64 * 2).from_buffer(memory)


def beat() -> None:
    """Count one piece of progress."""
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
