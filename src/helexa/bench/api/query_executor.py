"""Runs database queries in one thread, so that they do not block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from helexa.bench.results.archive import Archive
from helexa.bench.results.summary import summary
from helexa.bench.store.database import StoreError
from helexa.core.errors import ApiError

_MOST_WAITING = 64

T = TypeVar("T")


class QueryExecutor:
    """Runs queries on the result database in a separate thread.

    The database is opened at the first query. If another file has replaced the database file, the next query opens the
    new file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "archive")
        self._archive: Archive | None = None
        self._file: tuple[int, int] | None = None
        self._waiting = 0

    async def ask(self, query: Callable[[Archive], T]) -> T:
        """Run `query` on the database in the executor's thread and return its result.

        Raises:
            ApiError: status 503, if the database cannot be opened or too many queries are already waiting.
        """
        if self._waiting >= _MOST_WAITING:
            raise ApiError(503, "overloaded", "too many questions at once", retry_after=1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, query)
        except StoreError as error:
            raise ApiError(503, "no_database", str(error), retry_after=10) from None
        finally:
            self._waiting -= 1

    async def warm_up(self) -> None:
        """Run the query of the overview page before the first request, to fill the cache with its results."""
        with suppress(ApiError):
            await self.ask(summary)

    async def close(self) -> None:
        """Stop the thread, drop waiting queries, and close the database."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._archive is not None:
            self._archive.close()

    def _run(self, query: Callable[[Archive], T]) -> T:
        return query(self._current())

    def _current(self) -> Archive:
        try:
            status = self._path.stat()
        except OSError:
            raise StoreError("nothing has been measured yet") from None
        file = (status.st_dev, status.st_ino)
        if self._archive is None or file != self._file:
            if self._archive is not None:
                self._archive.close()
                self._archive = None
            self._archive, self._file = Archive(self._path), file
        return self._archive
