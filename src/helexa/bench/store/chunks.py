"""Encodes the arrival times of a response's chunks as bytes for the database.

The bytes are the gaps between the times in microseconds (little-endian uint32), compressed by zlib.
"""

import zlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

_LONGEST_US = 2**32 - 1


def pack(moments: Sequence[float]) -> bytes | None:
    """Encode ascending times in seconds since the request was sent. Return None if there are no times."""
    if not moments:
        return None
    microseconds = np.rint(np.asarray(moments, dtype=np.float64) * 1e6)
    gaps = np.clip(np.diff(microseconds, prepend=0.0), 0, _LONGEST_US)
    return zlib.compress(gaps.astype("<u4").tobytes())


def unpack(packed: bytes | None) -> tuple[float, ...]:
    """Decode times that `pack` has encoded. Return seconds since the request was sent."""
    if packed is None:
        return ()
    gaps = np.frombuffer(zlib.decompress(packed), dtype="<u4")
    return tuple(total / 1e6 for total in accumulate(int(gap) for gap in gaps))
