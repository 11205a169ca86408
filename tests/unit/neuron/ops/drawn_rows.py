"""Sampling settings of rows with given random numbers."""

import numpy as np

from helexa.neuron.ops.sampling import Adjustments, Sampling

_MASK64 = (1 << 64) - 1
_AGAIN = 0xD6E8FEB86659FD93


def drawn(*rows: tuple[float, ...], again: bool = False, adjustments: Adjustments | None = None) -> Sampling:
    """Return settings of rows given as (temperature, top-k, top-p, min-p, random number).

    Args:
        again: whether the random numbers are those of the second draw.
    """
    return Sampling(
        filters=np.array([row[:4] for row in rows], np.float32),
        seeds=np.array([_seed(row[4], again) for row in rows], np.uint64),
        positions=np.zeros(len(rows), np.int64),
        adjustments=adjustments or Adjustments(),
    )


def _seed(number: float, again: bool) -> int:
    """Return the seed of a random number at position 0: the inverse of SplitMix64."""
    state = _unshifted(round(number * 2**53) << 11, 31)
    for multiplier, shift in ((0x94D049BB133111EB, 27), (0xBF58476D1CE4E5B9, 30)):
        state = _unshifted(state * pow(multiplier, -1, 1 << 64) & _MASK64, shift)
    state -= 0x632BE59BD9B4E019 + again * _AGAIN
    return state * pow(0xD1342543DE82EF95, -1, 1 << 64) & _MASK64


def _unshifted(value: int, shift: int) -> int:
    """Return x with `x ^ x >> shift == value`."""
    x = value
    for _ in range(64 // shift):
        x = value ^ x >> shift
    return x
