"""Reads results from the database, and caches the results of queries."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Self, TypeVar

from helexa.bench.results.dimension_tables import DimensionTables
from helexa.bench.store.reader import Reader

_MOST_ANSWERS = 256
_MOST_PERMANENT = 8192

T = TypeVar("T")


class Archive:
    """The result database, opened for reading, with caches of query results. Only one thread at a time may use it.

    Attributes:
        reader: the database without caches.
    """

    def __init__(self, path: Path) -> None:
        self.reader = Reader(path)
        self._version = -1
        self._answers: OrderedDict[Hashable, object] = OrderedDict()
        self._permanent: OrderedDict[Hashable, object] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self.reader.close()

    @property
    def tables(self) -> DimensionTables:
        """Rows of all targets, hosts, builds, models and scenarios by row id."""
        return self.answer("tables", lambda: DimensionTables.read(self.reader))

    def answer(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the result of `find()`, and cache it under `key`.

        The cached result is used until another process writes to the database.
        """
        version = self.reader.select("PRAGMA data_version")[0][0]
        if version != self._version:
            self._version = version
            self._answers.clear()
        return _remembered(self._answers, _MOST_ANSWERS, key, find)

    def keep(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the result of `find()`, and cache it under `key`, for a result that never changes.

        In contrast to `answer`, the cached result is also used after another process has written to the database.
        """
        return _remembered(self._permanent, _MOST_PERMANENT, key, find)


def _remembered(memory: OrderedDict[Hashable, object], most: int, key: Hashable, find: Callable[[], T]) -> T:
    if key in memory:
        memory.move_to_end(key)
        return memory[key]  # type: ignore[return-value]
    result = find()
    memory[key] = result
    if len(memory) > most:
        memory.popitem(last=False)
    return result
