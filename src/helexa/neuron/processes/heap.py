"""Limit the free memory that the C library's heaps retain, and return it to the operating system."""

import ctypes
import gc
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's <malloc.h>
_ARENAS = 2
_KEPT_BYTES = 4 << 20


def bound() -> None:
    """Limit this process to two glibc heaps, which return most freed memory to the operating system.

    Call this function before starting threads. By default, glibc gives each thread its own heap. Each heap keeps its
    peak size, about 20 MiB after a thread has read a vocabulary or a long prompt. Sharing two heaps costs up to a sixth
    more CPU time if all threads tokenize long prompts at the same time. With a C library other than glibc, the function
    does nothing.
    """
    option = getattr(_library(), "mallopt", None)
    if option is not None:
        option(_ARENA_MAX, _ARENAS)
        option(_TRIM_THRESHOLD, _KEPT_BYTES)
        option(_MMAP_THRESHOLD, _KEPT_BYTES)  # by default this threshold and the trim threshold grow with freed blocks


def give_back() -> None:
    """Return freed memory to the operating system, after a model was loaded or unloaded. Takes a few milliseconds.

    The function also runs Python's garbage collector. The collector's own schedule counts objects, not bytes, so a
    large vocabulary in a reference cycle might otherwise stay in memory for days.
    """
    gc.collect()
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
