"""Settings of the C library's heap, so that memory is returned to the system."""

import ctypes
import gc
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's <malloc.h>
_ARENAS = 2
_KEPT_BYTES = 4 << 20


def bound() -> None:
    """Limit this process to two heaps of the C library, which keep little free memory. Call before starting threads.

    By default, glibc gives each thread its own heap. A heap keeps its peak size, which is about 20 MiB after reading a
    vocabulary or a long prompt. With shared heaps, tokenization takes up to a sixth more CPU time if all threads
    tokenize long prompts at once. Other work takes no additional CPU time. Other C libraries than glibc are not
    changed.
    """
    option = getattr(_library(), "mallopt", None)
    if option is not None:
        option(_ARENA_MAX, _ARENAS)
        option(_TRIM_THRESHOLD, _KEPT_BYTES)
        option(_MMAP_THRESHOLD, _KEPT_BYTES)  # by default this threshold and the trim threshold grow with freed blocks


def give_back() -> None:
    """Return the memory of a removed model to the system. Takes some milliseconds.

    The function runs Python's garbage collector, because the collector counts objects, not bytes, and may otherwise
    leave a vocabulary in a reference cycle for days.
    """
    gc.collect()
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
