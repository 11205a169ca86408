"""Interface of the ledger's database, and functions that retry database work.

SQLite and PostgreSQL run the same SQL text: both understand `$1` placeholders, `ON CONFLICT` and `RETURNING`. helexa
uses no SQL builder, because storing a request must take only microseconds.
"""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from helexa.core.errors import ConfigError, HelexaError
from helexa.core.logs import quoted

_MAX_TEXT_CHARS = 200

Row = dict[str, Any]
Args = Sequence[Any]
Step = tuple[str, Sequence[Args]]  # one statement, and the arguments of each of its executions

log = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_RETRY_SECS = 0.25  # delay before the first retry; doubles with every retry
_LONGEST_RETRY_SECS = 2.0  # upper limit of the delay
_FRESH_SECS = 1.0


class DatabaseError(HelexaError):
    """The database cannot be reached, or is locked, full or read-only."""


class Sql(ABC):
    """Runs SQL statements in an open transaction, or each in its own transaction."""

    @abstractmethod
    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        """Run one statement and return its rows."""

    @abstractmethod
    async def execute(self, sql: str, *args: Any) -> int:
        """Run one statement and return how many rows it changed."""


class Database(Sql):
    """An open database. A statement outside of `transaction` is its own transaction.

    A statement that writes and returns rows must run in a `transaction`, because `fetch` may use a connection that only
    reads. All methods raise `DatabaseError` when the database does not answer.

    Args:
        replacement: advice for error messages: how to begin with an empty database.
    """

    def __init__(self, replacement: str) -> None:
        self._replacement = replacement

    @abstractmethod
    def transaction(self, *, durable: bool = False) -> AbstractAsyncContextManager[Sql]:
        """Return a context manager for a transaction that may write.

        The transaction is committed when the `with` block ends. If the block raises, the transaction is rolled back.

        Args:
            durable: True if the commit must survive a power failure. Each durable commit waits for the disk.
        """

    @abstractmethod
    async def write(self, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        """Run a batch of statements in one transaction, with few round trips.

        Args:
            guard: a statement and its arguments, run first. The batch is written only if the guard changes a row, so a
                repeated batch is not written twice.
            steps: the statements of the batch, each with the arguments of all its executions.

        Returns:
            True if the batch was written.
        """

    @abstractmethod
    async def claim(self) -> Path | None:
        """Reserve the database for this gateway, if the backend allows only one gateway.

        Returns:
            The path of the database file, or None if the backend allows several gateways.

        Raises:
            HelexaError: another gateway uses the database.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish running statements and close all connections."""

    @abstractmethod
    def _dialect(self, statement: str) -> str:
        """Translate a migration statement from SQLite's syntax to this database's."""

    @abstractmethod
    async def _lock_schema(self, sql: Sql) -> None:
        """Prevent other processes from migrating the tables until the transaction ends."""

    async def migrate(self) -> None:
        """Create or upgrade the tables. Several processes may call this at the same time.

        Raises:
            ConfigError: a newer version of helexa created or upgraded the database, or an unreleased one created it.
        """
        migrations = _migrations()
        async with self.transaction() as sql:
            await self._lock_schema(sql)
            await sql.execute(
                self._dialect(
                    "CREATE TABLE IF NOT EXISTS migrations "
                    "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL) STRICT"
                )
            )
            (row,) = await sql.fetch("SELECT MAX(version) AS version FROM migrations")
            current = row["version"] or 0
            if current > max(migrations):
                raise ConfigError(
                    f"the ledger's database is at version {current}, newer than this helexa knows "
                    f"({max(migrations)}); upgrade helexa"
                )
            if 0 < current < min(migrations):
                raise ConfigError(
                    f"the ledger's database is at version {current}, from an unreleased helexa; "
                    f"{self._replacement}. Its keys and usage are not read"
                )
            for version in sorted(version for version in migrations if version > current):
                name, text = migrations[version]
                for statement in _statements(text):
                    await sql.execute(self._dialect(statement))
                await sql.execute("INSERT INTO migrations VALUES ($1, $2, $3)", version, name, time.time())


def _migrations() -> dict[int, tuple[str, str]]:
    folder = resources.files("helexa.cortex.ledger") / "migrations"
    files = [file for file in folder.iterdir() if file.name.endswith(".sql")]
    return {int(file.name[:4]): (file.name.removesuffix(".sql"), file.read_text("utf-8")) for file in files}


def _statements(text: str) -> list[str]:
    without_comments = re.sub(r"--.*", "", text)
    return [statement.strip() for statement in without_comments.split(";") if statement.strip()]


class Retry:
    """Repeats database work until it succeeds, and records why it fails."""

    def __init__(self) -> None:
        self.problem: str | None = None  # why the database cannot be written, or None if the last attempt succeeded
        self.written_at = float("-inf")  # when an attempt last succeeded (`time.monotonic`)

    @property
    def fresh(self) -> bool:
        """True if work on the database succeeded within the last second."""
        return time.monotonic() - self.written_at < _FRESH_SECS

    async def until_done(
        self,
        work: Callable[[], Awaitable[T]],
        failed: Callable[[float], None],
        retried: type[Exception] = Exception,
    ) -> T:
        """Repeat `work` with increasing delays until it succeeds, and return its result.

        Args:
            failed: called after each failed attempt with the seconds since the first attempt began.
            retried: exception type after which `work` is repeated; other exceptions are raised.
        """
        started_at, delay = time.monotonic(), FIRST_RETRY_SECS
        while True:
            try:
                outcome = await work()
            except retried as error:
                self._record_problem(error)
                failed(time.monotonic() - started_at)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_RETRY_SECS)
            else:
                if self.problem is not None:
                    log.info("ledger's database can be written again")
                self.problem, self.written_at = None, time.monotonic()
                return outcome

    def _record_problem(self, error: Exception) -> None:
        """Store why the database cannot be written, and log the reason if it is new."""
        message = str(error) if isinstance(error, DatabaseError) else f"unexpected {type(error).__name__}: {error}"
        if message != self.problem:
            log.error(
                "ledger's database cannot be written error=%s; requests of keys with a budget may fail", quoted(message)
            )
        self.problem = message


async def repeat(work: Callable[[], Awaitable[None]], interval_secs: float, problem: str) -> None:
    """Repeat the database work `work` until canceled, with pauses.

    An exception of `work` does not stop the repetition. Of several failures in a row, only the first is logged. The
    next success is logged too.

    Args:
        problem: value of the field `problem` in the log line about a failed call.
    """
    has_failed = False
    while True:
        await asyncio.sleep(interval_secs)
        try:
            await work()
        except Exception as error:
            if not has_failed:
                log.warning(
                    "periodic work failed problem=%s error=%s retry_secs=%g; the work is tried again",
                    *(quoted(problem), quoted(error), interval_secs),
                )
            has_failed = True
        else:
            if has_failed:
                log.info("periodic work succeeds again problem=%s", quoted(problem))
            has_failed = False


def are_plain(texts: Sequence[str]) -> bool:
    """Return True only if `plain` would leave all `texts` unchanged."""
    joined = "".join(texts)
    return joined.isascii() and "\0" not in joined and max(map(len, texts), default=0) <= _MAX_TEXT_CHARS


def plain(text: str) -> str:
    """Return untrusted text in a form that every database accepts.

    The text is cut to `_MAX_TEXT_CHARS` characters. NUL is removed, and lone surrogates become `?`.
    """
    if len(text) <= _MAX_TEXT_CHARS and text.isascii() and "\0" not in text:
        return text
    # PostgreSQL rejects NUL and lone surrogates.
    return text[:_MAX_TEXT_CHARS].replace("\0", "").encode("utf-8", "replace").decode()
