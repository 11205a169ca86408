"""Indexes over a sequence's tokens: n-grams for drafts, counts for penalties.

Speculative decoding by n-gram lookup drafts tokens without a draft model. If the last n tokens of a sequence already
occurred in its prompt or output, the tokens that followed this earlier occurrence become the draft. Repetitive text
yields long drafts, for example if the output is an edited copy of a file in the prompt. The required match length and
the number of draft tokens adapt to the acceptance of earlier drafts. The index of a long prompt is built in parts over
several steps, from the end of the prompt to its beginning.
"""

from collections import Counter, deque
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from helexa.neuron.engine.scheduling.draft_length import Acceptance

# Lengths of the n-grams in the index. The long n-gram is looked up first, because a short n-gram may occur in several
# contexts.
_LONG, _SHORT = 8, 3
_MAX_OLDER = 2048  # prompt tokens that one call of `Drafter` indexes, in about two milliseconds
_LEAST_MATCH, _FIRST_MATCH, _MOST_MATCH = 3, 5, 32  # number of tokens that must equal an earlier occurrence
_LEAST_DEPTH, _FIRST_DEPTH, _MOST_DEPTH = 2, 4, 10  # number of draft tokens

_DECAY = 0.8  # factor by which each step with drafts reduces the weight of earlier drafts
_FIRST_CAPACITY = 256


class Drafter:
    """Drafts tokens for one sequence by n-gram lookup (see the module)."""

    def __init__(self, tokens: list[int]) -> None:
        # The sequence's tokens. The drafter reads this list again at each call, so the list must only grow.
        self._tokens = tokens
        self.acceptance = Acceptance(_DECAY)
        self._depth = _FIRST_DEPTH
        self._match = _FIRST_MATCH
        # The index has the n-grams that are followed by a token at an index from `_begin` to `_end` - 1.
        self._begin = self._end = len(tokens)
        # Hash of an n-gram -> index of the token after its latest occurrence. Hashes need less memory than the n-grams.
        # If two n-grams have the same hash, `draft` compares the tokens and returns no draft.
        self._index: dict[int, int] = {}

    @property
    def may_draft(self) -> bool:
        """Whether `draft` can return tokens once the next token of the sequence is known."""
        self._read()
        # `draft` will require that `_match` tokens are equal. All of them except the next token are known already.
        gram_length = _LONG if self._match > _LONG else _SHORT
        return self._match <= _SHORT or hash(tuple(self._tokens[-gram_length:])) in self._index

    def draft(self, limit: int) -> tuple[int, ...]:
        """Return up to `limit` drafts after the last token; () without a repetition."""
        self._read()
        tokens = self._tokens
        get = self._index.get
        previous_end = get(hash(tuple(tokens[-_LONG:]))) or get(hash(tuple(tokens[-_SHORT:])))
        # The last `_match` tokens of the sequence must equal the tokens before `previous_end`. This comparison also
        # detects a collision of hashes.
        if previous_end is None or tokens[max(previous_end - self._match, 0) : previous_end] != tokens[-self._match :]:
            return ()
        period = len(tokens) - previous_end  # a draft beyond the end of the tokens continues the repetition
        return tuple(tokens[previous_end + i % period] for i in range(min(self._depth, limit)))

    def learn(self, drafted: int, accepted: int) -> None:
        """Adapt the draft length and the required match length to the result of a draft."""
        self.acceptance.learn(drafted, accepted)
        if accepted == drafted:
            self._depth = min(2 * self._depth, _MOST_DEPTH)
            self._match = _LEAST_MATCH
        # Some of the drafts were accepted, so the next draft is one token longer than the accepted part.
        elif accepted:
            self._depth = max(accepted + 1, _LEAST_DEPTH)
            self._match = max(self._match - 1, _LEAST_MATCH)
        else:
            self._depth = max(self._depth // 2, _LEAST_DEPTH)
            self._match = min(self._match * 2, _MOST_MATCH)

    def _read(self) -> None:
        """Index the n-grams of new tokens and of at most `_MAX_OLDER` older tokens."""
        tokens = self._tokens
        for end in range(self._end, len(tokens)):
            for n in (_SHORT, _LONG):
                if end >= n:
                    self._index[hash(tuple(tokens[end - n : end]))] = end
        self._end = len(tokens)
        begin, self._begin = self._begin, max(self._begin - _MAX_OLDER, 0)
        for n in (_SHORT, _LONG):
            first = max(self._begin, n)
            older = tokens[first - n : max(begin - 1, 0)]
            hashes = list(map(hash, zip(*(older[i:] for i in range(n)), strict=False)))
            # If a later occurrence of an n-gram is in the index already, `setdefault` keeps it.
            deque(map(self._index.setdefault, reversed(hashes), range(begin - 1, first - 1, -1)), maxlen=0)


class TokenCounts:
    """The distinct tokens of one sequence, and how often each occurs."""

    def __init__(self, tokens: list[int], start: int = 0) -> None:
        # Token ids of the sequence; the list only grows. A negative number is a placeholder for a token that is not
        # known yet. The owner of the list later replaces the placeholder by the token.
        self._tokens = tokens
        self._read = start  # index of the first token that is not counted yet
        # The tokens and their counts are in arrays and not in a dict, because each step needs them as arrays.
        self._places: dict[int, int] = {}  # token -> index in the arrays
        self._distinct = np.empty(_FIRST_CAPACITY, np.int32)
        self._counts = np.empty(_FIRST_CAPACITY, np.int32)

    def distinct(self) -> NDArray[np.int32]:
        """Return the distinct known tokens in order of first occurrence.

        A later call of a method may change the array.
        """
        self._read_new()
        return self._distinct[: len(self._places)]

    def counts(self) -> NDArray[np.int32]:
        """Return how often each token in the result of `distinct` occurs.

        A later call of a method may change the array.
        """
        self._read_new()
        return self._counts[: len(self._places)]

    def with_drafts(self, drafts: Rows[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return distinct tokens and counts as if `drafts` followed the known tokens."""
        distinct, counts = self.distinct(), self.counts()
        if not drafts:
            return distinct, counts
        # Drafts may be rejected, so they change a copy of the counts.
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
        if not new:
            return
        self._read += len(new)
        known = len(self._places)
        # Most steps add one token, for which a `Counter` takes longer than the rest of this method.
        for token, count in Counter(new).items() if len(new) > 1 else ((new[0], 1),):
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._distinct):
                self._distinct, self._counts = _doubled(self._distinct), _doubled(self._counts)
            if place >= known:
                self._distinct[place], self._counts[place] = token, count
            else:
                self._counts[place] += count


def _doubled(array: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate((array, np.empty_like(array)))
