"""The cost model of steps: seconds = base + row * (decode rows) + token * (prompt tokens).

A decode row is one token of a decoding sequence. The coefficients `base`, `row` and `token` are learned from the
durations of finished steps.
"""

from collections import deque

_LINE_DECAY = 0.97  # factor by which each new decode-only step reduces the weight of earlier ones
_MIN_SPREAD = 0.02  # ratio of the row counts' standard deviation to their mean below which the slope is unknown
_MAX_OUTLIER = 3.0  # times the predicted seconds; slower steps count as this, because the machine may have slept
_EWMA_WEIGHT = 0.25  # of the latest step in moving averages
_WORST_OF = 4  # number of latest steps; several, because the load from other processes varies


class StepCost:
    """Learns the coefficients of the cost model from finished steps, and predicts the duration of steps.

    The duration is base + row * (decode rows) + token * (prompt tokens). `base` and `row` are learned from steps with
    decode rows only. `token` is learned from steps with decode rows and prompt tokens.

    Args:
        token_seconds: measured seconds of a step with one token, used as the first value of `worst_token`; 0 if
            unknown.

    Attributes:
        token: seconds that one prompt token adds to a step with decode rows; None until measured.
    """

    def __init__(self, token_seconds: float = 0.0) -> None:
        self.token: float | None = None
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, rows, seconds, rows * rows, rows * seconds
        self._line: tuple[float, float] | None = None  # base and row
        self._decode: float | None = None  # moving average of decode-only steps
        self._first_worst = token_seconds
        self._worst: deque[float] = deque(maxlen=_WORST_OF)

    @property
    def knows_rows(self) -> bool:
        """Whether the cost of a decode row is known. This requires decode steps with different row counts."""
        return self._line is not None

    @property
    def worst_token(self) -> float:
        """Seconds per token in the slowest of the latest large steps with prompt tokens."""
        return max(self._worst, default=self._first_worst)

    def decode(self, rows: int) -> float | None:
        """Return the predicted seconds of a step with `rows` decode rows and no prompt tokens.

        If the cost of a row is unknown, return the average duration of the steps without prompt tokens. Return None
        before the first of these steps.
        """
        return self._decode if self._line is None else self._line[0] + self._line[1] * rows

    def rows(self, seconds: float) -> float:
        """Return how many decode rows a step without prompt tokens can compute in `seconds`.

        The caller must check `knows_rows` before.
        """
        assert self._line is not None
        base, row = self._line
        return (seconds - base) / row if row > 0 else float("inf")

    def learn(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a finished step with decode rows.

        Args:
            rows: number of decode rows.
            prompt_tokens: number of prompt tokens.
            seconds: duration of the step.
        """
        if not prompt_tokens:
            self._learn_decode(rows, seconds)
        elif (decode := self.decode(rows)) is not None:
            self.token = _averaged(self.token, max(seconds - decode, 0.0) / prompt_tokens)

    def learn_worst(self, tokens: int, seconds: float) -> None:
        """Learn the value of `worst_token` from a finished step, which must be large or slow."""
        self._worst.append(seconds / tokens)

    def _learn_decode(self, rows: int, seconds: float) -> None:
        self._decode = _averaged(self._decode, seconds)
        if self._line is not None:
            seconds = min(seconds, _MAX_OUTLIER * (self._line[0] + self._line[1] * rows))
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        n, x, y, xx, xy = self._sums = tuple(  # type: ignore[assignment]
            old * _LINE_DECAY + value for old, value in zip(self._sums, new, strict=True)
        )
        mean_x, mean_y = x / n, y / n
        variance = xx / n - mean_x * mean_x
        if variance <= (_MIN_SPREAD * mean_x) ** 2:
            self._line = None
        else:
            row = min(max((xy / n - mean_x * mean_y) / variance, 0.0), mean_y / mean_x)
            self._line = (mean_y - row * mean_x, row)


def _averaged(average: float | None, latest: float) -> float:
    return latest if average is None else average + _EWMA_WEIGHT * (latest - average)
