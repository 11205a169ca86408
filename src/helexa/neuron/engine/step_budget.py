"""How many prompt tokens a step may carry, so that it stays well below the time limit of a step."""

from collections import deque

_SHARE = 1 / 8  # of the time limit: a step whose cost was estimated badly still ends in time
_LEAST = 16  # tokens: a step of so few takes hardly longer than a step of one
_REMEMBERED = 4  # steps: the slowest of them counts, as load from other processes comes and goes


class StepBudget:
    """Bounds prompt tokens by the measured time per token. The bound is a power of two, so that step sizes recur.

    Args:
        most: tokens, however little time they take.
        limit: seconds without progress after which an engine counts as hung; infinite for no bound by time.
        token_seconds: time of a step of one token, from which the bound begins; 0 if it was not measured.
    """

    def __init__(self, most: int, limit: float = float("inf"), token_seconds: float = 0.0) -> None:
        self._most = most
        self._seconds = limit * _SHARE
        self._token_seconds = deque([token_seconds], _REMEMBERED)
        self._measured = False

    def learn(self, tokens: int, seconds: float) -> None:
        """Record a finished step that had prompt tokens among its `tokens`.

        Part of a step's time is the same for any number of tokens, so a step far below the bound says little about a
        step at the bound. Its time per token is ignored, unless the step took longer than a step may.
        """
        if tokens < self.tokens // 2 and seconds <= self._seconds:
            return
        if not self._measured:  # what the first estimate says is superseded by any step of real size
            self._token_seconds.clear()
            self._measured = True
        self._token_seconds.append(seconds / tokens)

    @property
    def tokens(self) -> int:
        """Prompt tokens that the next step may carry."""
        slowest = max(self._token_seconds)
        affordable = self._seconds / slowest if slowest > 0 else float("inf")
        if affordable >= self._most:
            return self._most
        return min(max(1 << int(affordable).bit_length() >> 1, _LEAST), self._most)
