"""How many prompt tokens a step may carry, so that other requests wait briefly and the step ends in time."""

from collections import deque

_SHARE = 1 / 8  # of the time limit: a step whose cost was estimated badly still ends in time
_LEAST = 16  # tokens: a step of so few takes hardly longer than a step of one
_BRIEF_SECONDS = 0.5  # requests that arrive during a step wait for its end
_LEAST_BRIEF = 32  # tokens: native kernels take as long per token in a step of so few as in a step of 512
_REMEMBERED = 4  # steps: the slowest of them counts, as load from other processes comes and goes


class StepBudget:
    """Bounds prompt tokens by the measured time per token. The bound is a power of two, so that step sizes recur.

    Args:
        most: tokens, however little time they take.
        limit: seconds without progress after which an engine counts as hung; infinite for no bound by time.
        token_seconds: time of a step of one token, from which the bound begins; 0 if it was not measured.
        brief: seconds that a step may take where it has more than a few tokens.
    """

    def __init__(
        self, most: int, limit: float = float("inf"), token_seconds: float = 0.0, brief: float = _BRIEF_SECONDS
    ) -> None:
        self._most = most
        self._seconds = limit * _SHARE
        self._brief = brief
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
        brief = max(self._within(self._brief, slowest), _LEAST_BRIEF)
        return min(max(self._within(self._seconds, slowest), _LEAST), brief, self._most)

    def _within(self, seconds: float, token_seconds: float) -> int:
        """Return the tokens that take at most `seconds`: a power of two, or `most`."""
        affordable = seconds / token_seconds if token_seconds > 0 else float("inf")
        return self._most if affordable >= self._most else 1 << int(affordable).bit_length() >> 1
