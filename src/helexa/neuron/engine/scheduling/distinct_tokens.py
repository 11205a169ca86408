"""Maintains the distinct tokens of a growing token list as an array, for repetition penalties."""

import numpy as np
from numpy.typing import NDArray

_FIRST_ROOM = 256


class DistinctTokens:
    """The distinct tokens of one sequence. Each call of `array` reads only the tokens that are new since the last call.

    Args:
        tokens: token ids of the sequence; the list only grows. A negative number is a placeholder for a token that is
            not known yet. The owner of the list later replaces the placeholder by the token.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._read = 0
        self._known: set[int] = set()
        self._array = np.empty(_FIRST_ROOM, np.int64)

    def array(self) -> NDArray[np.int64]:
        """Return the known tokens without duplicates, in order of first occurrence.

        The array is valid until the next call.
        """
        new = self._tokens[self._read :]
        while new and new[-1] < 0:
            new.pop()
        self._read += len(new)
        unseen = [token for token in dict.fromkeys(new) if token not in self._known]
        count = len(self._known)
        if count + len(unseen) > len(self._array):
            larger = np.empty(2 * (count + len(unseen)), np.int64)
            larger[:count] = self._array[:count]
            self._array = larger
        self._array[count : count + len(unseen)] = unseen
        self._known.update(unseen)
        return self._array[: len(self._known)]
