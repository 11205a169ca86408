"""Drafts by n-gram lookup: what followed the last tokens the last time they were there, in prompt or output.

Texts that repeat themselves, as an edited file repeats the original, are guessed many tokens at a time. How long a
match must be, and how many tokens are guessed from it, follows what became of the guesses before.
"""

_LONG, _SHORT = 8, 3  # n-grams that are looked up; the long ones tell apart what many short ones have in common
_LEAST_MATCH, _FIRST_MATCH, _MOST_MATCH = 3, 5, 32
_LEAST_DEPTH, _FIRST_DEPTH, _MOST_DEPTH = 2, 4, 10


class Drafter:
    """Drafts for one sequence.

    Args:
        tokens: its tokens, which may only grow.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._depth = _FIRST_DEPTH
        self._match = _FIRST_MATCH
        self._indexed = len(tokens)
        # n-gram -> where the last one ended, if a token came after it
        self._index: dict[tuple[int, ...], int] = {}
        for n in (_SHORT, _LONG):
            grams = zip(*(tokens[i:-1] for i in range(n)), strict=False)
            self._index.update(zip(grams, range(n, len(tokens)), strict=True))

    @property
    def may_draft(self) -> bool:
        """Whether there may be guesses when one more token is known; else there are none, whichever it is."""
        self._read()
        known = _LONG if self._match > _LONG else _SHORT  # of the tokens that must match, all but the next one
        return self._match <= _SHORT or tuple(self._tokens[-known:]) in self._index

    def draft(self, limit: int) -> tuple[int, ...]:
        """Guesses of the next tokens, at most `limit`; none when nothing promising was found."""
        self._read()
        tokens = self._tokens
        place = self._index.get(tuple(tokens[-_LONG:])) or self._index.get(tuple(tokens[-_SHORT:]))
        if place is None or tokens[max(place - self._match, 0) : place] != tokens[-self._match :]:
            return ()
        period = len(tokens) - place  # a draft that reaches the end goes on as if the text repeated itself
        return tuple(tokens[place + i % period] for i in range(min(self._depth, limit)))

    def learn(self, drafted: int, accepted: int) -> None:
        """Take note of how many tokens of a draft were right."""
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
        """Index the n-grams that have got a token after them."""
        tokens = self._tokens
        for end in range(self._indexed, len(tokens)):
            for n in (_SHORT, _LONG):
                if end >= n:
                    self._index[tuple(tokens[end - n : end])] = end
        self._indexed = len(tokens)
