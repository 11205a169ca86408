"""Database interface of the ledger: SQLite for a single gateway, PostgreSQL for several gateways with one ledger.

Both databases run the same SQL text: both understand `$1` placeholders, `ON CONFLICT` and `RETURNING`. helexa uses no
SQL builder, because writing a request must cost only microseconds.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from helexa.core.errors import ConfigError, HelexaError

Row = dict[str, Any]
Args = Sequence[Any]
Step = tuple[str, Sequence[Args]]  # one statement, and the arguments of each execution


class DatabaseError(HelexaError):
    """Raised if the database cannot be reached, or reports an error that may be temporary (locked, full, read-only)."""


class Sql(Protocol):
    """Interface of an open transaction, in which SQL statements can be run."""

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        """Run one statement and return its rows.

        Raises:
            DatabaseError: the database does not answer.
        """
        ...

    async def execute(self, sql: str, *args: Any) -> int:
        """Run one statement and return how many rows it changed.

        Raises:
            DatabaseError: the database does not answer.
        """
        ...


class Database(ABC):
    """An open database. All methods raise `DatabaseError` when the database does not answer."""

    @abstractmethod
    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        """Run one read-only statement and return its rows.

        A statement that writes and returns rows must run in a `transaction` instead.
        """

    @abstractmethod
    async def execute(self, sql: str, *args: Any) -> int:
        """Run one statement in its own transaction and return how many rows it changed."""

    @abstractmethod
    def transaction(self, *, durable: bool = False) -> AbstractAsyncContextManager[Sql]:
        """Return a context manager for a transaction that may write.

        The transaction is committed when the `with` block ends. If the block raises, the transaction is rolled back.

        Args:
            durable: True if the commit must survive a power failure. Each durable commit waits for the disk.
        """

    @abstractmethod
    async def write(self, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        """Run a batch of statements in one transaction with as few round trips as possible.

        Args:
            guard: a statement and its arguments, run first. The batch is written only if the guard changes a row. This
                prevents that a repeated batch is written twice.
            steps: the statements of the batch, each with the arguments of all its executions.

        Returns:
            True if the batch was written. False if the guard changed no row; nothing is written in this case.
        """

    @abstractmethod
    async def claim(self) -> Path | None:
        """Prevent other gateways from using the database, if the backend allows only one gateway.

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
        """Translate a migration statement, which uses SQLite's types, to the SQL of this database."""

    @abstractmethod
    async def _lock_schema(self, sql: Sql) -> None:
        """Prevent other processes from migrating the tables until the transaction ends."""

    async def migrate(self) -> None:
        """Create or upgrade the tables. Several processes may call this at the same time.

        Raises:
            ConfigError: a newer version of helexa created or upgraded the database.
        """
        known_migrations = _migrations()
        async with self.transaction() as sql:
            await self._lock_schema(sql)
            await sql.execute(
                self._dialect(
                    "CREATE TABLE IF NOT EXISTS migrations "
                    "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL) STRICT"
                )
            )
            applied_versions = {row["version"] for row in await sql.fetch("SELECT version FROM migrations")}
            if unknown_versions := applied_versions - known_migrations.keys():
                raise ConfigError(
                    f"the ledger's database is at version {max(unknown_versions)}, newer than this helexa knows "
                    f"({max(known_migrations)}); upgrade helexa"
                )
            for version in sorted(known_migrations.keys() - applied_versions):
                name, text = known_migrations[version]
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
