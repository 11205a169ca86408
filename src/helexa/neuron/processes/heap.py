"""The C library's heap: what threads needed once goes back to the system."""

import ctypes
import gc
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's <malloc.h>
_ARENAS = 2
_KEPT_BYTES = 4 << 20


def bound() -> None:
    """Let the threads of this process share two heaps that keep little of what is free. To be called before any starts.

    Left alone, glibc gives every thread a heap of its own, and lets each keep as much as it once needed, which is some
    20 MiB for reading a vocabulary or a long prompt. Sharing costs up to a sixth more CPU time where all threads cut
    long prompts into tokens at once, and nothing otherwise. Other C libraries are left as they are.
    """
    option = getattr(_library(), "mallopt", None)
    if option is not None:
        option(_ARENA_MAX, _ARENAS)
        option(_TRIM_THRESHOLD, _KEPT_BYTES)
        option(_MMAP_THRESHOLD, _KEPT_BYTES)  # would grow with what is freed, and the other one with it


def give_back() -> None:
    """Free what a model leaves that nobody uses any more. Takes some milliseconds.

    A vocabulary is small in the eyes of Python's collector, which may leave it in a cycle for days.
    """
    gc.collect()
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
