"""Memory of processes: heaps that retain little, and shared memory."""

import ctypes
import fcntl
import gc
import mmap
import os
from contextlib import suppress
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's <malloc.h>
# By default, glibc has up to 8 arenas per core. Each arena keeps freed memory that other arenas cannot use.
_ARENAS = 2
_KEPT_BYTES = 4 << 20

# Constants of <linux/fcntl.h>. `fcntl` of a Python that was built with an old C library lacks their names.
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4


def bound_heaps() -> None:
    """Limit this process to two glibc heaps, so that it returns most freed memory.

    Call this function before starting threads. With a C library other than glibc, it does nothing.
    """
    # By default, glibc gives each thread its own heap, which keeps its peak size: about 20 MiB after a thread has read
    # a vocabulary or a long prompt. Two heaps cost up to a sixth more CPU time if all threads tokenize long prompts at
    # the same time.
    option = getattr(_library(), "mallopt", None)
    if option is not None:
        option(_ARENA_MAX, _ARENAS)
        option(_TRIM_THRESHOLD, _KEPT_BYTES)
        option(_MMAP_THRESHOLD, _KEPT_BYTES)  # by default this threshold and the trim threshold grow with freed blocks


def use_one_heap() -> None:
    """Make all threads of this process allocate from one glibc heap.

    Call this function before starting threads. With a C library other than glibc, it does nothing.
    """
    # `trim_heaps` returns the free memory at the end of the first heap only. Other heaps would keep theirs, which is up
    # to 64 MiB for each heap.
    option = getattr(_library(), "mallopt", None)
    if option is not None:
        option(_ARENA_MAX, 1)


def trim_heaps() -> None:
    """Collect Python's garbage; return freed memory to the system. May take 20 ms."""
    # The function also runs Python's garbage collector. The collector's own schedule counts objects, not bytes, so a
    # large vocabulary in a reference cycle might otherwise stay in memory for days.
    gc.collect()
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def prefer_page_size(memory: mmap.mmap, *, huge: bool) -> bool:
    """Ask for huge or small pages for `memory`; return whether the system accepted."""
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    # A kernel without transparent huge pages, such as that of the Raspberry Pi 5, rejects the advice.
    with suppress(OSError):
        if advice is not None:
            memory.madvise(advice)
            return True
    return False


def create_shared(name: str, size: int) -> int:
    """Return a descriptor of `size` zeroed bytes that other processes can map."""
    # On Linux, the size cannot change afterwards, so a process that has mapped the memory can always access it. The
    # operating system allocates physical memory only when a page is first written.
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # not Linux, or a sandbox forbids the call (EPERM or ENOSYS)
        import tempfile  # slow, and rarely needed

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        return descriptor
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    return descriptor
