"""How many prompt tokens a step may carry while others decode, so that these do not wait much longer than usual."""

from helexa.neuron.engine.step_cost import StepCost

_FIRST = 32  # tokens, until it is known what they cost
_LEAST = 8  # tokens: a prompt always goes on
_STRETCH = 2.0  # a step with prompt tokens may take so many times one in which all decode that are here
_WEIGHT = 0.25  # of the latest step in the averages
_BARE_EVERY = 32  # steps, one is without prompts, so that it is known what decoding takes


class Pace:
    """Learns from steps what decoding takes, and what a prompt token adds to it at the depth that prompts are at now.

    Args:
        most: tokens, whatever they cost.

    Attributes:
        cost: of decoding.
    """

    def __init__(self, most: int) -> None:
        self.cost = StepCost()
        self._most = most
        self._decode: float | None = None  # seconds of a step
        self._token: float | None = None  # seconds that a prompt token adds
        self._laden = 0  # steps with prompts since the last without

    def tokens(self, seconds: float) -> int:
        """Prompt tokens that add so many seconds to a step; one at least, so that every prompt goes on."""
        known = _FIRST if self._token is None else int(seconds / max(self._token, 1e-9))
        return min(max(known, 1), self._most or known)

    def beside(self, share: float) -> int:
        """Prompt tokens that add so large a share to a step of decoding; 0 as long as too little is known."""
        return 0 if self._decode is None or self._token is None else self.tokens(share * self._decode)

    def room(self, rows: int, width: int) -> int:
        """Prompt tokens that the next step may carry.

        Args:
            rows: sequences that decode in it.
            width: sequences that will decode when they and those that wait have been read. What they are going to wait
                for one another is the measure: a few that came first do not hold up a crowd.
        """
        if self._laden >= _BARE_EVERY:
            return 0
        if self._decode is None or self._token is None:
            return min(_FIRST, self._most)
        alone, together = self.cost.seconds(rows), self.cost.seconds(width)
        if alone is None or together is None:
            alone = together = self._decode
        affordable = (_STRETCH * together - alone) / max(self._token, 1e-9)
        return min(max(int(affordable), _LEAST), self._most)

    def learn(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Take note of a step in which so many rows decoded."""
        if prompt_tokens == 0:
            self._laden = 0
            self._decode = _averaged(self._decode, seconds)
            self.cost.learn(rows, seconds)
            return
        self._laden += 1
        if (decode := self.cost.seconds(rows) or self._decode) is not None:
            self._token = _averaged(self._token, max(seconds - decode, 0.0) / prompt_tokens)


def _averaged(average: float | None, latest: float) -> float:
    return latest if average is None else average + _WEIGHT * (latest - average)
