"""Counts the distinct tokens of a growing token list, for repetition, frequency and presence penalties."""

from collections import Counter
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 256


class TokenCounts:
    """The distinct tokens of one sequence, and how often each occurs. Each token of the sequence is read only once.

    Args:
        tokens: token ids of the sequence; the list only grows. A negative number is a placeholder for a token that is
            not known yet. The owner of the list later replaces the placeholder by the token.
        start: index of the first token that counts.
    """

    def __init__(self, tokens: list[int], start: int = 0) -> None:
        self._tokens = tokens
        self._read = start
        self._places: dict[int, int] = {}  # token -> index in the arrays
        self._distinct = np.empty(_FIRST_CAPACITY, np.int32)
        self._counts = np.empty(_FIRST_CAPACITY, np.int32)

    def distinct(self) -> NDArray[np.int32]:
        """Return the known tokens without duplicates, in order of first occurrence.

        The array is valid until the next call of a method.
        """
        self._read_new()
        return self._distinct[: len(self._places)]

    def counts(self) -> NDArray[np.int32]:
        """Return how often each token of `distinct` occurs. The array is valid until the next call of a method."""
        self._read_new()
        return self._counts[: len(self._places)]

    def with_drafts(self, drafts: Rows[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the distinct tokens and their counts as if `drafts` followed the known tokens.

        The arrays are valid until the next call of a method.
        """
        distinct, counts = self.distinct(), self.counts()
        if not drafts:
            return distinct, counts
        counts = counts.copy()
        unseen: Counter[int] = Counter()
        for token in drafts:
            if (place := self._places.get(token)) is None:
                unseen[token] += 1
            else:
                counts[place] += 1
        return (
            np.concatenate((distinct, np.array(list(unseen), np.int32))),
            np.concatenate((counts, np.array(list(unseen.values()), np.int32))),
        )

    def _read_new(self) -> None:
        """Count the tokens that are new since the last call."""
        new = self._tokens[self._read :]
        while new and new[-1] < 0:
            new.pop()
        self._read += len(new)
        known = len(self._places)
        for token, count in Counter(new).items():
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._distinct):
                self._distinct, self._counts = _doubled(self._distinct), _doubled(self._counts)
            if place >= known:
                self._distinct[place], self._counts[place] = token, count
            else:
                self._counts[place] += count


def _doubled(array: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate((array, np.empty_like(array)))
