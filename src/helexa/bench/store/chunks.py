"""Moments of a request's chunks as bytes: zlib of the gaps between them, little-endian uint32 microseconds."""

import zlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

_LONGEST_US = 2**32 - 1


def pack(moments: Sequence[float]) -> bytes | None:
    """Pack moments in seconds, ascending, that count from the request's start; None without any."""
    if not moments:
        return None
    microseconds = np.rint(np.asarray(moments, dtype=np.float64) * 1e6)
    gaps = np.clip(np.diff(microseconds, prepend=0.0), 0, _LONGEST_US)
    return zlib.compress(gaps.astype("<u4").tobytes())


def unpack(packed: bytes | None) -> tuple[float, ...]:
    """The moments in seconds."""
    if packed is None:
        return ()
    gaps = np.frombuffer(zlib.decompress(packed), dtype="<u4")
    return tuple(total / 1e6 for total in accumulate(int(gap) for gap in gaps))
