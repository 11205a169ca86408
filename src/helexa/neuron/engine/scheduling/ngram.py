"""Speculative decoding by n-gram lookup: drafts tokens without a draft model.

If the last n tokens of a sequence already occurred in its prompt or output, the tokens that followed this earlier
occurrence become the draft. Repetitive text yields long drafts, for example if the output is an edited copy of a file
in the prompt. The required match length and the number of draft tokens adapt to the acceptance of earlier drafts.

The index of a long prompt is built in parts over several steps, from the end of the prompt to its beginning.
"""

from collections import deque

_LONG, _SHORT = 8, 3  # lengths of the n-grams in the index; a short n-gram may occur in several contexts
_MAX_OLDER = 2048  # tokens of the prompt that one call adds to the index, which takes about two milliseconds
_LEAST_MATCH, _FIRST_MATCH, _MOST_MATCH = 3, 5, 32
_LEAST_DEPTH, _FIRST_DEPTH, _MOST_DEPTH = 2, 4, 10


class Drafter:
    """Drafts tokens for one sequence by n-gram lookup (see the module).

    Args:
        tokens: the sequence's tokens. The drafter reads the list again at each call; it must only grow.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._depth = _FIRST_DEPTH
        self._match = _FIRST_MATCH
        self._begin = self._end = len(tokens)  # the n-grams before each of these tokens are in the index
        # Hash of an n-gram -> index of the token after its latest occurrence. Hashes need less memory than the n-grams.
        # If two n-grams have the same hash, `draft` compares the tokens and returns no draft.
        self._index: dict[int, int] = {}

    @property
    def may_draft(self) -> bool:
        """Whether `draft` may return tokens when the next token of the sequence is known. If False, it returns none."""
        self._read()
        gram_length = _LONG if self._match > _LONG else _SHORT  # known tokens at the end that a match contains
        return self._match <= _SHORT or hash(tuple(self._tokens[-gram_length:])) in self._index

    def draft(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` draft tokens, which may follow the sequence's last token.

        The result is empty if the end of the sequence does not match an earlier part of the sequence.
        """
        self._read()
        tokens = self._tokens
        get = self._index.get
        previous_end = get(hash(tuple(tokens[-_LONG:]))) or get(hash(tuple(tokens[-_SHORT:])))
        if previous_end is None or tokens[max(previous_end - self._match, 0) : previous_end] != tokens[-self._match :]:
            return ()
        period = len(tokens) - previous_end  # a draft beyond the end of the tokens continues the repetition
        return tuple(tokens[previous_end + i % period] for i in range(min(self._depth, limit)))

    def learn(self, drafted: int, accepted: int) -> None:
        """Adapt the draft length and the required match length to the result of a draft.

        Args:
            drafted: number of draft tokens.
            accepted: number of draft tokens that were accepted.
        """
        if accepted == drafted:
            self._depth = min(2 * self._depth, _MOST_DEPTH)
            self._match = _LEAST_MATCH
        elif accepted:
            self._depth = max(accepted + 1, _LEAST_DEPTH)
            self._match = max(self._match - 1, _LEAST_MATCH)
        else:
            self._depth = max(self._depth // 2, _LEAST_DEPTH)
            self._match = min(self._match * 2, _MOST_MATCH)

    def _read(self) -> None:
        """Add the n-grams before new tokens, and before at most `_MAX_OLDER` older tokens, to the index."""
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
            # A later occurrence that is in the index already takes precedence.
            deque(map(self._index.setdefault, reversed(hashes), range(begin - 1, first - 1, -1)), maxlen=0)
