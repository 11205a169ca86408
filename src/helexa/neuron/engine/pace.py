"""How many prompt tokens a step may carry while others decode, so that these do not wait much longer than usual."""

_FIRST = 32  # tokens, until it is known what they cost
_LEAST = 8  # tokens: a prompt always goes on
_STRETCH = 2.0  # a step with prompt tokens may take so many times one without
_WEIGHT = 0.25  # of the latest step in the averages


class Pace:
    """Learns from steps what decoding takes, and what a prompt token adds to it at the depth that prompts are at now.

    Args:
        most: tokens, whatever they cost.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._decode: float | None = None  # seconds of a step
        self._token: float | None = None  # seconds that a prompt token adds

    def tokens(self, seconds: float) -> int:
        """Prompt tokens that add so many seconds to a step; one at least, so that every prompt goes on."""
        known = _FIRST if self._token is None else int(seconds / max(self._token, 1e-9))
        return min(max(known, 1), self._most or known)

    def beside(self, share: float) -> int:
        """Prompt tokens that add so large a share to a step of decoding; 0 as long as too little is known."""
        return 0 if self._decode is None or self._token is None else self.tokens(share * self._decode)

    @property
    def room(self) -> int:
        """Prompt tokens that the next step may carry."""
        if self._decode is None or self._token is None:
            return min(_FIRST, self._most)
        affordable = (_STRETCH - 1) * self._decode / max(self._token, 1e-9)
        return min(max(int(affordable), _LEAST), self._most)

    def learn(self, prompt_tokens: int, seconds: float, usual: float | None = None) -> None:
        """Take note of a step in which others decoded; `usual` is what it takes without prompts, if that is known."""
        if prompt_tokens == 0:
            self._decode = _averaged(self._decode, seconds)
        elif (decode := usual or self._decode) is not None:
            self._token = _averaged(self._token, max(seconds - decode, 0.0) / prompt_tokens)


def _averaged(average: float | None, latest: float) -> float:
    return latest if average is None else average + _WEIGHT * (latest - average)
