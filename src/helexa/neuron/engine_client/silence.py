"""Tells an engine that hangs from one that works."""


class Silence:
    """Tells an engine that hangs from one that works: by how often one looked and nothing new had come.

    It counts looks, not seconds: a server that was stopped for a while itself does not blame its engine.

    Args:
        patience: looks without news while there is work.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._seen = -1
        self._looks = 0

    def look(self, news: int, working: bool) -> bool:
        """Whether the engine hangs.

        Args:
            news: a count that grows with each sign of life.
            working: whether it has something to do.
        """
        self._looks = self._looks + 1 if working and news == self._seen else 0
        self._seen = news
        return self._looks >= self._patience
