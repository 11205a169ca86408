"""Detects an engine that hangs."""


class Silence:
    """Detects an engine that hangs: counts consecutive checks without news.

    It counts checks, not seconds, so a suspended server process does not take its engine for hung.

    Args:
        patience: number of consecutive checks without news, while there is work, at which the engine counts as hung.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._seen = -1
        self._looks = 0

    def look(self, news: int, working: bool) -> bool:
        """Check the engine; return whether it hangs.

        Args:
            news: a count that grows with each report or progress of the engine.
            working: whether the engine has work.
        """
        self._looks = self._looks + 1 if working and news == self._seen else 0
        self._seen = news
        return self._looks >= self._patience
