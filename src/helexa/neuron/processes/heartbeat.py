"""Count an engine's progress in memory that the engine and its server share.

The engine increments the count during its work: after each work item of a native kernel, each layer of the model and
each piece of a file. The server compares two readings. If the count has not changed, the engine hangs; if the count has
grown, the engine is alive, even if it is slow. An increment costs nanoseconds and needs no thread, message or system
call.
"""

import ctypes
import mmap
import os
import struct
import tempfile

_COUNTS = struct.Struct("=2q")  # Python's count and the native kernels' count; each has one writer at a time
_SIZE = mmap.PAGESIZE


class _Engine:
    """The progress counts of an engine process. They are in private memory until `attach` maps the shared memory."""

    counts = (ctypes.c_int64 * 2)()


class Heartbeat:
    """The server's side of a heartbeat: shared memory that holds the progress count of one engine.

    Attributes:
        fd: file descriptor of the memory, which the engine process inherits; valid until `release_fd` is called.
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
        """How often the engine has counted progress; the number only grows."""
        return sum(_COUNTS.unpack_from(self._memory))

    def release_fd(self) -> None:
        """Close the file descriptor. The memory stays mapped."""
        os.close(self.fd)

    def close(self) -> None:
        """Unmap the shared memory."""
        self._memory.close()


def attach(fd: int) -> None:
    """Keep this process's progress counts in the shared memory behind `fd`.

    Called once, when an engine process starts.
    """
    memory = mmap.mmap(fd, _SIZE)
    os.close(fd)
    _Engine.counts = (ctypes.c_int64 * 2).from_buffer(memory)


def beat() -> None:
    """Increment the engine's progress count."""
    _Engine.counts[0] += 1


def kernel_count_address() -> int:
    """Return the address of the int64 progress count that the native kernels increment."""
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
