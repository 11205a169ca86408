"""What a step of decoding takes, by how many rows it has."""

_KEPT = 0.97  # of the weight of earlier steps, with each new one
_SPREAD = 0.02  # of the mean: with rows more alike than that, nothing is known of others
_HICCUP = 3.0  # a step that took so many times what was expected says nothing of the next ones


class StepCost:
    """A straight line through the latest steps: seconds over rows."""

    def __init__(self) -> None:
        self._steps = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        """Take note of a step."""
        expected = self.seconds(rows)
        if expected is not None:
            seconds = min(seconds, _HICCUP * expected)
        for name, value in (
            ("_steps", 1),
            ("_x", rows),
            ("_y", seconds),
            ("_xx", rows * rows),
            ("_xy", rows * seconds),
        ):
            setattr(self, name, getattr(self, name) * _KEPT + value)

    def seconds(self, rows: int) -> float | None:
        """What a step of so many rows takes; None as long as too little is known."""
        line = self._line()
        return None if line is None else line[0] + line[1] * rows

    def rows(self, seconds: float) -> float:
        """How many rows a step of so many seconds has; only when that is known."""
        line = self._line()
        assert line is not None
        base, each = line
        return (seconds - base) / each if each > 0 else float("inf")

    def _line(self) -> tuple[float, float] | None:
        """Seconds without rows, and of each row."""
        if not self._steps:
            return None
        x, y = self._x / self._steps, self._y / self._steps
        spread = self._xx / self._steps - x * x
        if spread <= (_SPREAD * x) ** 2:
            return None
        each = min(max((self._xy / self._steps - x * y) / spread, 0.0), y / x)
        return y - each * x, each
